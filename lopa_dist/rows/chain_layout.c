/* The layout of a causal model's forward: what `row_counts_plain` and `lay_out_plain` of chain_layout.py return, with their
 * names. */

#include <stdint.h>

enum { PROMPT, CHAIN, GROUP, PATH };

typedef int64_t Int;

/* Write what `RowCounts` has: `totals`, which are its `group`, the number of depths D, and its `groups`, `rows` and
 * `width`; `masks` [sequences, D]; and `common` and `path` [sequences].
 *
 * `branches`, `drafts`, `expects_eos`, `limit` and `complete` [sequences] are those of `HostState`. `wanted` masks follow
 * the last draft of each sequence and the depths in `also` [num_also], or, if `has_group` [sequences, width] is not 0,
 * those that it marks. `lead` is that of `Lookahead`. `masks` has room for the depths of all slots.
 */
void chain_counts(
    Int sequences, const Int *branches, const Int *drafts, const Int *expects_eos, const Int *limit,
    const Int *complete, Int wanted, Int lead, Int num_also, const Int *also, Int width, const uint8_t *has_group,
    Int *totals, Int *masks, Int *common, Int *path
) {
    Int group = 1, depths = 1, groups = 0, rows = 0, of_paths = 0;
    for (Int s = 0; s < sequences; s++)
        if (branches[s] > 0 && drafts[s] >= depths) depths = drafts[s] + 1;
    for (Int s = 0; s < sequences; s++) {
        Int running = branches[s] > 0, last = running ? drafts[s] : 0, own = running + last;
        for (Int depth = 0; depth < depths; depth++) {
            int here = depth == last;
            for (Int i = 0; i < num_also; i++) here |= depth == also[i];
            if (has_group) here = depth < width && has_group[s * width + depth];
            /* after the token at a depth, which has the position complete - 1 + depth, mask i predicts position
             * complete + depth + i; the answer's last position is predicted without a draft */
            Int most = limit[s] - 2 - complete[s] - depth, count = most < wanted ? most : wanted;
            if (!here || !running || depth > last - expects_eos[s] || count < 0) count = 0;
            masks[s * depths + depth] = count;
            group = count > group ? count : group;
            groups += count > 0;
            own += count ? count + lead : 0;
        }
        common[s] = own;
        path[s] = branches[s] > 1 ? last + masks[s * depths + last] : 0;
        rows += own;
        of_paths += path[s];
    }
    Int all[] = {group, depths, groups, rows, of_paths};
    for (int i = 0; i < 5; i++) totals[i] = all[i];
}

/* Write the layout of a forward into `made`.
 *
 * `prompt_sequence`, `prompt_first` and `prompt_stop` [num_prompts] are those of `Prefill`. `prompt`, `complete`,
 * `branches` and `drafts` [sequences] are those of `HostState`, `masks` [sequences, depths] and `paths` [sequences]
 * those of `RowCounts`. `blocks` and `lead` are those of `Lookahead`; `group` is n of `ChainCells`. `own` [num_own]
 * are the branches beside the chain that run on this rank. A row of the canvas has `columns` tokens; position 0 is at
 * `origin`. `most_segments` and `most_rows` are bounds, and `width` is the sum of `paths`; rows are padded to a
 * multiple of `tile`.
 *
 * `made` has: the numbers of segments, rows, predictions, those of them that are no path's, rows that hold masks, and
 * drafts of paths; of segments [6, most_segments]: sequence, branch, start, rows, shared, first; of rows [3, most_rows]:
 * hi, seen, place; [2, most_rows + tile]: canvas_cells, positions; of predictions [5, most_rows]: heads, columns,
 * head_sequence, predicted, cells; masks [most_rows]; path_cells [width]; drafts, chain_cells [2, num_own x width].
 */
void chain_layout(
    Int num_prompts, const Int *prompt_sequence, const Int *prompt_first, const Int *prompt_stop,
    Int sequences, Int depths, const Int *prompt, const Int *complete, const Int *branches, const Int *drafts,
    const Int *masks, const Int *paths, Int blocks, Int lead, Int group,
    Int num_own, const Int *own, Int max_branches, Int max_drafts, Int width,
    Int columns, Int origin, Int most_segments, Int most_rows, Int tile, Int *made
) {
    Int *sizes = made, *of_segments = sizes + 6, *hi = of_segments + 6 * most_segments;
    Int *seen = hi + most_rows, *kept = seen + most_rows;
    Int *canvas_cells = kept + most_rows, *positions = canvas_cells + most_rows + tile;
    Int *heads = positions + most_rows + tile, *head_columns = heads + most_rows;
    Int *head_sequence = head_columns + most_rows, *predicted = head_sequence + most_rows;
    Int *cells = predicted + most_rows, *of_masks = cells + most_rows, *path_cells = of_masks + most_rows;
    Int *of_drafts = path_cells + width, *chain_cells = of_drafts + num_own * width;
    Int segment = 0, row = 0, head = 0, common = 0, mask_rows = 0, draft_rows = 0;

    for (Int kind = PROMPT; kind <= PATH; kind++) {
        if (kind == PATH) common = head;
        for (Int turn = 0; turn < (kind == PATH ? num_own : 1); turn++) {
            Int begin = 0; /* of the sequence's path among this turn's */
            for (Int i = 0; i < (kind == PROMPT ? num_prompts : sequences); i++)
                for (Int depth = 0; depth < (kind == GROUP ? depths : 1); depth++) {
                    Int s = kind == PROMPT ? prompt_sequence[i] : i, branch = 0, first, count;
                    Int pending = complete[s] - 1; /* its position */
                    if (kind == PROMPT) {
                        branch = -1;
                        first = prompt_first[i];
                        count = prompt_stop[i] - first;
                    } else if (kind == CHAIN) {
                        if (branches[s] <= 0) continue;
                        first = pending;
                        count = drafts[s] + 1;
                    } else if (kind == GROUP) {
                        if (masks[s * depths + depth] <= 0) continue;
                        first = pending + depth + !blocks;
                        count = masks[s * depths + depth] + lead;
                    } else {
                        branch = own[turn];
                        first = pending + 1;
                        count = paths[s];
                        begin += count;
                        if (count <= 0 || branch >= branches[s]) continue;
                    }
                    Int in_scratch = kind >= GROUP, shared = prompt[s] + first + (in_scratch ? 0 : count);
                    Int values[] = {s, branch, row, count, shared, first};
                    for (int field = 0; field < 6; field++) of_segments[field * most_segments + segment] = values[field];
                    segment++;
                    for (Int number = 0; number < count; number++, row++) {
                        Int position = first + number, place = prompt[s] + position;
                        hi[row] = !in_scratch ? 0 : kind == GROUP && blocks ? count : number + 1;
                        seen[row] = in_scratch ? prompt[s] + first : place + 1;
                        kept[row] = in_scratch ? -1 : place;
                        canvas_cells[row] = s * columns + origin + position;
                        positions[row] = place;
                        /* of the token from which it predicts, and of a mask after that: a group's 0 and -1 predict
                         * nothing */
                        Int of_depth = number, mask = 0;
                        if (kind == GROUP) {
                            of_depth = depth;
                            mask = number + 1 - lead;
                        } else if (kind == PATH) {
                            of_depth = number + 1 < drafts[s] ? number + 1 : drafts[s];
                            mask = number + 1 - of_depth;
                            if (!mask) {
                                of_drafts[draft_rows] = row;
                                chain_cells[draft_rows++] = (s * max_branches + branch) * max_drafts + number;
                            }
                        }
                        if (mask > 0 || (kind == GROUP && mask == 0)) of_masks[mask_rows++] = row;
                        if (kind == PROMPT || (kind == GROUP && mask <= 0)) continue;
                        heads[head] = row;
                        head_columns[head] = kind == PATH ? common + turn * width + begin - count + number : head;
                        head_sequence[head] = s;
                        predicted[head] = position + !(kind == GROUP && blocks);
                        cells[head++] = (s * depths + of_depth) * (1 + group) + mask;
                    }
                }
        }
    }
    for (Int s = 0; width && s < sequences; s++)
        for (Int number = 1; number <= paths[s]; number++) {
            Int depth = number < drafts[s] ? number : drafts[s];
            *path_cells++ = (s * depths + depth) * (1 + group) + number - depth;
        }
    Int padded = row ? (row + tile - 1) / tile * tile : tile;
    for (Int i = row; i < padded; i++) {
        canvas_cells[i] = row ? canvas_cells[0] : 0; /* a token of a text, which every model can embed */
        positions[i] = 0;
    }
    Int all[] = {segment, row, head, common, mask_rows, draft_rows};
    for (int i = 0; i < 6; i++) sizes[i] = all[i];
}
