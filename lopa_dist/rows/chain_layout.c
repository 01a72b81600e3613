/* The layout of a causal model's forward: what `chain_layout.lay_out_plain` returns, with its names. */

#include <stdint.h>

enum { PROMPT, CHAIN, GROUP, PATH };

typedef int64_t Int;

/* Write the layout of a forward into `made`.
 *
 * `of_prompts` [3, num_prompts] are the arrays `sequence`, `first` and `stop` of `Prefill`. `prompt`, `complete`,
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
                        Int cell = (s * depths + of_depth) * (1 + group) + mask;
                        cells[head++] = cell;
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
