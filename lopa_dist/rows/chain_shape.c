/* The shape of a forward of prompts, chains and groups of masks, without paths: what `causal_rows.shape_of_plain` returns,
 * with its names. */

#include <stdint.h>

enum { PROMPT, CHAIN, GROUP };

typedef int64_t Int;

/* Write the shape of a forward.
 *
 * `prompts` [3, num_prompts] are sequence, place of the first row and number of rows of each prompt's segment.
 * `branches` and `drafts` [sequences] are those of `HostState`, `masks` [sequences, depths] are those of `RowCounts`.
 * `blocks` and `lead` are those of `Lookahead`; `group` is the width of `ChainCells`. The sizes of the results are known
 * to the caller: `of_segments` [8, segments] is kind, sequence, branch, first, rows, depth, start, shared; `of_rows`
 * [5, rows] sequence, place, seen, hi, in_scratch; `of_heads` [4, heads] row, sequence, cell, ahead; `of_masks` rows.
 */
void chain_shape(
    Int num_prompts, const Int *prompts, Int sequences, Int depths, const Int *branches, const Int *drafts,
    const Int *masks, int blocks, Int lead, Int group,
    Int segments, Int rows, Int heads, Int *of_segments, Int *of_rows, Int *of_heads, Int *of_masks
) {
    Int segment = 0, row = 0, head = 0;
    for (Int kind = PROMPT; kind <= GROUP; kind++)
        for (Int i = 0; i < (kind == PROMPT ? num_prompts : sequences); i++)
            for (Int depth = 0; depth < (kind == GROUP ? depths : 1); depth++) {
                int in_group = kind == GROUP;
                Int s = kind == PROMPT ? prompts[i] : i, first = 0, count;
                if (kind == PROMPT) {
                    first = prompts[num_prompts + i];
                    count = prompts[2 * num_prompts + i];
                } else if (kind == CHAIN) {
                    if (branches[s] <= 0) continue;
                    count = drafts[s] + 1;
                } else {
                    if (masks[s * depths + depth] <= 0) continue;
                    first = depth + !blocks;
                    count = masks[s * depths + depth] + lead;
                }
                Int shared = in_group ? first : first + count;
                Int made[] = {kind, s, kind == PROMPT ? -1 : 0, first, count, depth, row, shared};
                for (int field = 0; field < 8; field++) of_segments[field * segments + segment] = made[field];
                segment++;
                for (Int number = 0; number < count; number++, row++) {
                    Int seen = in_group ? first : first + number + 1;
                    Int hi = in_group ? (blocks ? count : number + 1) : 0;
                    Int of_row[] = {s, first + number, seen, hi, in_group};
                    for (int field = 0; field < 5; field++) of_rows[field * rows + row] = of_row[field];
                    Int mask = in_group ? number + 1 - lead : 0; /* a group's 0 and -1 predict nothing */
                    if (in_group && mask >= 0) *of_masks++ = row;
                    if (kind == PROMPT || (in_group && mask <= 0)) continue;
                    Int of_depth = in_group ? depth : number, cell = (s * depths + of_depth) * (1 + group) + mask;
                    Int of_head[] = {row, s, cell, in_group ? !blocks : 1};
                    for (int field = 0; field < 4; field++) of_heads[field * heads + head] = of_head[field];
                    head++;
                }
            }
}
