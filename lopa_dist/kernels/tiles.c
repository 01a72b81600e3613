/* Segments cut into tiles: what `tiles.tiles_of_plain` computes, with the same names and in the same order. */

#include <stdint.h>
#include <stdlib.h>

enum { FIELDS = 12, MERGE_FIELDS = 6, UNBOUNDED = 1 << 30 };

typedef int64_t Int;

typedef struct {
    Int q0, rows, c0, own, siblings, view[4], first, q1;
} Tile;

typedef struct {
    Int key; /* what is sorted by, in ascending order */
    Int number;
} Place;

static Int least(Int a, Int b) { return a < b ? a : b; }

static Int most(Int a, Int b) { return a > b ? a : b; }

static Int quotient_up(Int a, Int b) { return (a + b - 1) / b; }

static Int clamp(Int x, Int high) { return least(most(x, 0), high); }

/* Equal keys keep their order. */
static int compare(const void *left, const void *right) {
    const Place *a = left, *b = right;
    if (a->key != b->key) return a->key < b->key ? -1 : 1;
    return a->number < b->number ? -1 : a->number > b->number;
}

static void sort(Place *places, Int count) {
    for (Int i = 1; i < count; i++)
        if (places[i].key < places[i - 1].key) {
            qsort(places, count, sizeof(Place), compare);
            return;
        }
}

/* Join pairs of tiles as `tiles.paired` does; return how many tiles are left. */
static Int pair(Tile *tiles, Place *places, char *kept, Int count, Int tile_rows) {
    for (Int t = 0; t < count; t++) {
        const Int *view = tiles[t].view;
        uint64_t key = 2 * ((((uint64_t)view[0] * 3 + view[1]) * 5) + (uint64_t)view[2] * 7 + view[3]);
        int alone = tiles[t].siblings > 1 || view[1] + view[3] == 0;
        places[t] = (Place){alone ? -1 : (Int)(key + (tiles[t].own > 0)), t};
        kept[t] = 1;
    }
    sort(places, count);
    for (Int i = 1; i < count; i++) {
        Tile *chain = tiles + places[i - 1].number, *group = tiles + places[i].number;
        int fit = places[i].key == (Int)((uint64_t)places[i - 1].key + 1) && chain->own == 0 &&
                  chain->rows + group->rows <= tile_rows;
        for (int part = 0; part < 4; part++) fit = fit && chain->view[part] == group->view[part];
        if (!fit) continue;
        chain->rows += group->rows;
        chain->c0 = group->c0;
        chain->own = group->own;
        chain->q1 = group->q0;
        kept[places[i].number] = 0;
    }
    Int left = 0;
    for (Int t = 0; t < count; t++)
        if (kept[t]) tiles[left++] = tiles[t];
    return left;
}

/* Cut `segments` segments of `all_rows` packed rows into tiles.
 *
 * The arguments up to `depths` are those of `Segments`, with a null pointer for None; `parts`, `columns` and `room` are
 * those of `Split`, with no parts for no split and -1 for no room. `table` has room for `table_room` entries; `of_rows`
 * takes seen, lo, hi and depth of all rows; `counts` takes the numbers of entries, merges and parts, and the pool slot of
 * packed row 0.
 *
 * Return 0; 1: own K/V are not in packed order; 2: there is no memory; 3: the table has too little room.
 */
int tiles_cut(
    Int segments, Int all_rows, const Int *start, const Int *rows, const Int *shared_base, const Int *shared,
    const Int *own_base, const Int *tail_base, const Int *tail, const Int *his, const Int *seens, const Int *depths,
    Int tile_rows, int stacked, Int parts, Int columns, Int room, int32_t *table, Int table_room, int32_t *of_rows,
    int32_t *merges, Int *counts
) {
    int32_t *seen = of_rows, *lo = seen + all_rows, *hi = lo + all_rows, *depth = hi + all_rows;
    Int capacity = all_rows / tile_rows + segments + 1, places_room = most(most(capacity, table_room), segments);
    int result = 2;
    Tile *tiles = malloc(capacity * sizeof(Tile));
    Place *places = malloc(places_room * sizeof(Place));
    Int(*views)[4] = malloc((segments + 1) * sizeof(*views));
    char *kept = malloc(capacity);
    int32_t *unsorted = malloc((table_room + 1) * FIELDS * sizeof(int32_t));
    if (!tiles || !places || !views || !kept || !unsorted) goto end;

    /* segments in packed order, without those of no rows */
    Int some = 0;
    for (Int g = 0; g < segments; g++)
        if (rows[g] > 0) places[some++] = (Place){start[g], g};
    sort(places, some);
    Int scratch = some ? own_base[places[0].number] - start[places[0].number] : 0;
    for (Int r = 0; r < all_rows; r++) {
        seen[r] = seens ? (int32_t)seens[r] : UNBOUNDED;
        lo[r] = hi[r] = 0;
        depth[r] = depths ? (int32_t)depths[r] : 0;
    }
    for (Int i = 0; i < some; i++) {
        Int g = places[i].number, *view = views[i];
        if (own_base[g] - start[g] != scratch) {
            result = 1;
            goto end;
        }
        view[1] = shared[g];
        view[3] = tail ? tail[g] : 0;
        view[0] = view[1] > 0 ? shared_base[g] : 0; /* the base of an empty range means nothing */
        view[2] = view[3] > 0 ? tail_base[g] : 0;
        for (Int r = start[g]; r < start[g] + rows[g]; r++) {
            lo[r] = (int32_t)start[g];
            hi[r] = (int32_t)(his[r] + start[g]);
        }
    }

    /* stacks of segments, and their tiles */
    Int count = 0, sharing = 0;
    for (Int i = 0, next; i < some; i = next) {
        Int begin = start[places[i].number], height = rows[places[i].number], cached = views[i][1] + views[i][3];
        for (next = i + 1; next < some; next++) {
            Int g = places[next].number;
            int together = stacked && !seens && cached > 0 && start[g] == begin + height;
            for (int part = 0; part < 4; part++) together = together && views[next][part] == views[i][part];
            if (!together) break;
            height += rows[g];
        }
        sharing += cached > 0;
        Int siblings = quotient_up(height, tile_rows);
        for (Int q0 = begin; q0 < begin + height; q0 += tile_rows) {
            Int n = least(begin + height - q0, tile_rows), c1 = 0, last = 0;
            for (Int r = q0; r < q0 + n; r++) {
                c1 = most(c1, hi[r]);
                last = most(last, seen[r]);
            }
            Tile made = {q0, n, lo[q0], c1 - lo[q0], siblings, {0}, n, 0};
            for (int part = 0; part < 4; part++) made.view[part] = views[i][part];
            if (seens && made.own <= 0) { /* no further than the tile's rows see */
                Int visible = least(cached, last);
                made.view[1] = least(made.view[1], visible);
                made.view[3] = visible - made.view[1];
            }
            tiles[count++] = made;
        }
    }
    if (seens) count = pair(tiles, places, kept, count, tile_rows);

    /* the tiles' columns in parts */
    Int of_stack = parts;
    if (parts && room >= 0) of_stack = least(of_stack, room / most(sharing, 1));
    Int entries = 0, num_merges = 0, num_parts = 0;
    for (Int t = 0; t < count; t++) {
        const Tile *tile = tiles + t;
        Int s0 = tile->view[1], s1 = tile->view[3], cached = s0 + s1, all = cached + tile->own;
        Int needed = most(all, 1), width = needed;
        if (parts) {
            Int of_tile = cached > 0 ? most(of_stack / tile->siblings, 1) : 1;
            width = quotient_up(needed, of_tile * columns) * columns;
        }
        Int pieces = quotient_up(needed, width);
        if (entries + pieces > table_room) {
            result = 3;
            goto end;
        }
        for (Int number = 0; number < pieces; number++) {
            Int begin = number * width, end = least(begin + width, all);
            Int low0 = clamp(begin, s0), high0 = clamp(end, s0), low1 = clamp(begin - s0, s1), high1 = clamp(end - s0, s1);
            Int low2 = clamp(begin - cached, tile->own), high2 = clamp(end - cached, tile->own);
            Int made[FIELDS] = {
                tile->q0, tile->rows, tile->view[0] + low0, high0 - low0, tile->view[2] + low1, high1 - low1,
                tile->c0 + low2, tile->c0 + high2, pieces > 1 ? num_parts + number : -1, begin, tile->first, tile->q1,
            };
            places[entries] = (Place){begin - end, entries};
            for (int field = 0; field < FIELDS; field++) unsorted[entries * FIELDS + field] = (int32_t)made[field];
            entries++;
        }
        if (pieces > 1) {
            Int made[MERGE_FIELDS] = {tile->q0, tile->rows, num_parts, pieces, tile->first, tile->q1};
            for (int field = 0; field < MERGE_FIELDS; field++)
                merges[num_merges * MERGE_FIELDS + field] = (int32_t)made[field];
            num_merges++;
            num_parts += pieces;
        }
    }
    sort(places, entries); /* longest first */
    for (Int i = 0; i < entries; i++)
        for (int field = 0; field < FIELDS; field++)
            table[i * FIELDS + field] = unsorted[places[i].number * FIELDS + field];
    counts[0] = entries;
    counts[1] = num_merges;
    counts[2] = num_parts;
    counts[3] = scratch;
    result = 0;
end:
    free(tiles);
    free(places);
    free(views);
    free(kept);
    free(unsorted);
    return result;
}
