/* Drafts from text, as drafter.py and ngrams.py say, token for token (c_drafter.py compiles and calls this). */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LONGEST = 6, COUNT = 255, MATCH = 8, LEVELS = 8, DEPTHS = 16, SOURCES = 3, MASKS = 0, TEXT = 1, OWN = 2 };
enum { OF_OWN = 8 * (LONGEST + 1), OF_MASKS = OF_OWN + MATCH + 1, OF_BOTH = OF_MASKS + 2 * DEPTHS * LEVELS };

static const double DECAY = 0.998, SURE = 0.85;

static void *checked(void *memory) {
    if (!memory) abort();
    return memory;
}

static inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* ---- a table from keys to values that are not 0 ---- */

typedef struct {
    uint64_t key;
    int64_t value;
} Entry;

typedef struct {
    Entry *entries;
    int64_t room, count; /* room: a power of 2, at least twice `count` */
} Map;

static Map map_of(int64_t room) { return (Map){checked(calloc(room, sizeof(Entry))), room, 0}; }

static void map_free(Map *map) { free(map->entries); }

static inline int64_t home_of(const Map *map, uint64_t key) { return (int64_t)(mix(key) & (uint64_t)(map->room - 1)); }

static inline Entry *entry_of(const Map *map, uint64_t key) { /* where it is, or where there is room for it */
    int64_t at = home_of(map, key);
    while (map->entries[at].value && map->entries[at].key != key) at = (at + 1) & (map->room - 1);
    return map->entries + at;
}

static inline int64_t map_get(const Map *map, uint64_t key) { return entry_of(map, key)->value; }

static void map_put(Map *map, uint64_t key, int64_t value) {
    Entry *entry = entry_of(map, key);
    if (!entry->value && 2 * ++map->count > map->room) {
        Map wide = map_of(2 * map->room);
        for (int64_t i = 0; i < map->room; i++)
            if (map->entries[i].value) *entry_of(&wide, map->entries[i].key) = map->entries[i];
        wide.count = map->count;
        map_free(map);
        *map = wide;
        entry = entry_of(map, key);
    }
    *entry = (Entry){key, value};
}

/* ---- texts ---- */

typedef struct {
    double chance;
    int64_t token, source, text, text_kind, mask, mask_kind;
} Draft;

typedef struct {
    int64_t *tokens, length, room, counted;
    Map index; /* by two tokens: where the next one stands, lastly */
    Draft *chain;
    int64_t drafts, users;           /* users: its slot, and chains to learn from */
    int64_t counts[2][SOURCES];      /* drafts by their source: verified, and of these accepted */
} Text;

typedef struct {
    Text *text;
    Draft *chain;
    int64_t drafts, begin;
} Verified;

typedef struct {
    Map young, old;
    int64_t most, most_drafts, num_eos, dropped, slots, num_verified, room_verified;
    int64_t *eos;
    double *tried, *right, *chance;
    const double *hope;
    Text **texts; /* by slot; 0: none */
    Verified *verified;
    Text **left; /* since the last time that was learned */
    int64_t num_left, room_left;
} Drafter;

Drafter *drafter_new(int64_t most_entries, int64_t most_drafts, const int64_t *eos, int64_t num_eos, double *tried,
                     double *right, double *chance, const double *hope) {
    Drafter *d = checked(calloc(1, sizeof *d));
    d->young = map_of(1024), d->old = map_of(16);
    d->most = most_entries, d->most_drafts = most_drafts, d->num_eos = num_eos;
    d->eos = checked(malloc((num_eos + 1) * sizeof *eos));
    memcpy(d->eos, eos, num_eos * sizeof *eos);
    d->tried = tried, d->right = right, d->chance = chance, d->hope = hope;
    return d;
}

static void release(Text *text) {
    if (--text->users) return;
    free(text->tokens);
    map_free(&text->index);
    free(text->chain);
    free(text);
}

void drafter_leave(Drafter *d, int64_t slot) {
    if (d->num_left == d->room_left) {
        d->room_left = 2 * d->room_left + 16;
        d->left = checked(realloc(d->left, d->room_left * sizeof *d->left));
    }
    d->left[d->num_left++] = d->texts[slot];
    d->texts[slot] = 0;
}

void drafter_free(Drafter *d) {
    for (int64_t slot = 0; slot < d->slots; slot++)
        if (d->texts[slot]) drafter_leave(d, slot);
    for (int64_t i = 0; i < d->num_left; i++) release(d->left[i]);
    for (int64_t i = 0; i < d->num_verified; i++) {
        free(d->verified[i].chain);
        release(d->verified[i].text);
    }
    map_free(&d->young);
    map_free(&d->old);
    free(d->eos), free(d->texts), free(d->verified), free(d->left), free(d);
}

static inline uint64_t pair(int64_t a, int64_t b) { return (uint64_t)a << 32 | (uint32_t)b; }

static void extend(Text *text, const int64_t *tokens, int64_t count, int indexed) {
    if (text->length + count > text->room) {
        text->room = 2 * (text->length + count);
        text->tokens = checked(realloc(text->tokens, text->room * sizeof *tokens));
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t n = text->length;
        if (indexed && n > 1) map_put(&text->index, pair(text->tokens[n - 2], text->tokens[n - 1]), n);
        text->tokens[text->length++] = tokens[i];
    }
}

void drafter_admit(Drafter *d, int64_t slot, const int64_t *prompt, int64_t count, int64_t remembered) {
    if (slot >= d->slots) {
        int64_t slots = slot + 1 > 2 * d->slots ? slot + 1 : 2 * d->slots;
        d->texts = checked(realloc(d->texts, slots * sizeof *d->texts));
        memset(d->texts + d->slots, 0, (slots - d->slots) * sizeof *d->texts);
        d->slots = slots;
    }
    Text *text = d->texts[slot] = checked(calloc(1, sizeof *text));
    text->index = map_of(64), text->counted = count, text->users = 1;
    text->chain = checked(malloc((d->most_drafts + 1) * sizeof *text->chain));
    int64_t skipped = count > remembered ? count - remembered : 0;
    extend(text, prompt, skipped, 0);
    extend(text, prompt + skipped, count - skipped, 1);
}

/* What a step wrote to slots[i], one without a text apart: the first counts[i] of row i of written [n, wide]. What masks
predicted behind it, row i of token and bits [n, width] of which -1 ends the first, becomes row slots[i] of the tables
mask_token and mask_probability [S, reach], and its length mask_counts[slots[i]]; nothing if width is 0. */
void drafter_hear(Drafter *d, const int64_t *slots, int64_t n, const int64_t *written, const int64_t *counts, int64_t wide,
                  const int64_t *token, const int64_t *bits, int64_t width, int64_t *mask_token, double *mask_probability,
                  int64_t *mask_counts, int64_t reach) {
    for (int64_t i = 0; i < n; i++) {
        int64_t count = 0, at = slots[i] * reach, least = width < reach ? width : reach;
        for (int64_t j = 0; j < least; j++) {
            int32_t sent = bits[i * width + j];
            float probability;
            memcpy(&probability, &sent, sizeof probability);
            mask_token[at + j] = token[i * width + j], mask_probability[at + j] = probability;
            if (count == j && token[i * width + j] >= 0) count++;
        }
        if (width) mask_counts[slots[i]] = count;
        Text *text = slots[i] < d->slots ? d->texts[slots[i]] : 0;
        if (!text) continue;
        if (d->num_verified == d->room_verified) {
            d->room_verified = 2 * d->room_verified + 16;
            d->verified = checked(realloc(d->verified, d->room_verified * sizeof *d->verified));
        }
        d->verified[d->num_verified++] = (Verified){text, text->chain, text->drafts, text->length};
        text->users++;
        text->chain = checked(malloc((d->most_drafts + 1) * sizeof *text->chain));
        text->drafts = 0;
        extend(text, written + i * wide, counts[i], 1);
    }
}

/* ---- the table ---- */

static inline uint64_t key_of(uint64_t shorter, int64_t token) { return mix(shorter * 0x9E3779B97F4A7C15u + token + 1); }

void drafter_remember(Drafter *d, const int64_t *text, int64_t count, int64_t begin) {
    for (int64_t number = begin; number < count; number++) {
        int64_t token = text[number], most = number < LONGEST ? number : LONGEST;
        uint64_t keys[LONGEST + 1] = {0};
        for (int64_t order = 1; order <= most; order++) { /* the memory looks for all of them at once */
            keys[order] = key_of(keys[order - 1], text[number - order]);
            __builtin_prefetch(d->young.entries + home_of(&d->young, keys[order]), 1);
            if (d->old.count) __builtin_prefetch(d->old.entries + home_of(&d->old, keys[order]));
        }
        for (int64_t order = 1; order <= most; order++) {
            Entry *young = entry_of(&d->young, keys[order]);
            int64_t entry = young->value;
            int found = entry != 0;
            if (!found) entry = map_get(&d->old, keys[order]);
            if (!entry) entry = token << 8 | 1;
            else if (entry >> 8 == token) entry += (entry & COUNT) < COUNT;
            else entry = (entry & COUNT) > 1 ? entry - 1 : (token << 8 | 1);
            if (found) young->value = entry;
            else map_put(&d->young, keys[order], entry);
        }
    }
    if (d->young.count > d->most) {
        d->dropped |= d->old.count > 0;
        map_free(&d->old);
        d->old = d->young;
        d->young = map_of(1024);
    }
}

static int64_t after(Drafter *d, uint64_t key) {
    int64_t entry = map_get(&d->young, key);
    if (!entry && d->old.count && (entry = map_get(&d->old, key))) map_put(&d->young, key, entry);
    return entry;
}

/* the entries behind a context's last 1 ... LONGEST tokens, 0 for none */
void drafter_after(Drafter *d, const int64_t *context, int64_t count, int64_t *entries) {
    uint64_t key = 0;
    for (int64_t order = 1; order <= LONGEST; order++) {
        entries[order - 1] = 0;
        if (order > count) continue;
        key = key_of(key, context[count - order]);
        entries[order - 1] = after(d, key);
    }
}

int64_t drafter_dropped(const Drafter *d) { return d->dropped; }

/* ---- drafting, and learning from it ---- */

static int level(double probability) {
    double rest = 1.0 - probability;
    int halved = 0;
    while (rest < 0.5 && halved < LEVELS - 1) rest *= 2, halved++;
    return halved;
}

static int bits_of(int64_t count) { /* its bits, at most 7 */
    int bits = 64 - __builtin_clzll((unsigned long long)count);
    return bits < 7 ? bits : 7;
}

static void count_one(Drafter *d, int64_t kind, int right) {
    d->tried[kind] = DECAY * d->tried[kind] + 1;
    d->right[kind] = DECAY * d->right[kind] + right;
    d->chance[kind] = (d->right[kind] + d->hope[kind]) / (d->tried[kind] + 1);
}

int64_t drafter_num_verified(const Drafter *d) { return d->num_verified; }

/* the tokens and sources [drafts] of a chain that waits to be learned from */
int64_t drafter_verifying(const Drafter *d, int64_t number, int64_t *tokens, int64_t *sources) {
    const Verified *one = d->verified + number;
    for (int64_t j = 0; j < one->drafts; j++)
        tokens[j] = one->chain[j].token, sources[j] = one->chain[j].source;
    return one->drafts;
}

/* Learn from the chains that wait. total [2, SOURCES]: their drafts, and of these the accepted ones, by source, to which
they are added; of_left [n, 2, SOURCES]: all of the texts that have left since, in that order. */
void drafter_learn(Drafter *d, int64_t *total, int64_t *of_left) {
    for (int64_t i = 0; i < d->num_verified; i++) {
        Verified *one = d->verified + i;
        Text *text = one->text;
        int64_t left = text->length - one->begin;
        for (int64_t j = 0; j < one->drafts; j++) text->counts[0][one->chain[j].source]++, total[one->chain[j].source]++;
        for (int64_t j = 0; j < one->drafts && j < left; j++) {
            Draft *draft = one->chain + j;
            int64_t token = text->tokens[one->begin + j];
            if (draft->text >= 0) count_one(d, draft->text_kind, draft->text == token);
            if (draft->mask >= 0) count_one(d, draft->mask_kind, draft->mask == token);
            if (draft->token != token) break;
            text->counts[1][draft->source]++, total[SOURCES + draft->source]++;
        }
        drafter_remember(d, text->tokens, text->length, text->counted);
        text->counted = text->length;
        free(one->chain);
        release(text);
    }
    d->num_verified = 0;
    for (int64_t i = 0; i < d->num_left; i++) {
        memcpy(of_left + i * 2 * SOURCES, d->left[i]->counts, sizeof d->left[i]->counts);
        release(d->left[i]);
    }
    d->num_left = 0;
}

/* where the passage goes on that stands lastly at the text's end, and its length; 0: nowhere */
static int64_t passage_of(const Text *text, int64_t *length) {
    const int64_t *tokens = text->tokens;
    int64_t n = text->length, at;
    *length = 0;
    if (n < 2) return 0;
    at = map_get(&text->index, pair(tokens[n - 2], tokens[n - 1]));
    *length = 2;
    while (at && *length < MATCH && at > *length && tokens[at - *length - 1] == tokens[n - *length - 1]) ++*length;
    return at;
}

static int64_t draft_one(Drafter *d, Text *text, int64_t most, double worth, const int64_t *masks,
                         const double *probabilities, int64_t num_masks, int from_text, double *ends) {
    const double *chances = d->chance;
    int64_t context[LONGEST], known = text->length < LONGEST ? text->length : LONGEST, in_context = known;
    int64_t end = text->length, length = 0, passage = from_text ? passage_of(text, &length) : 0;
    int64_t on_track = 0;
    double reached = 1.0;
    memcpy(context, text->tokens + end - in_context, in_context * sizeof *context);
    text->drafts = 0;
    known *= from_text;
    if (!from_text && num_masks < most) most = num_masks;
    int64_t expects_eos = 0;
    for (int64_t depth = 0; depth < most; depth++) {
        int64_t token = -1, source = TEXT, kind = 0, longest = 0, top = known < LONGEST ? known : LONGEST;
        double chance = 0.0;
        uint64_t keys[LONGEST + 1] = {0};
        for (int64_t order = 1; order <= top; order++) keys[order] = key_of(keys[order - 1], context[in_context - order]);
        for (int64_t order = top; order > 0; order--) {
            int64_t entry = after(d, keys[order]);
            if (!entry) continue;
            if (!longest) longest = order;
            int64_t of = 8 * order + bits_of(entry & COUNT);
            if (chances[of] > chance) {
                token = entry >> 8, chance = chances[of], kind = of;
                if (chance > SURE) break;
            }
        }
        known = (longest + 1) * from_text;
        if (passage && chances[OF_OWN + length] > chance)
            token = text->tokens[passage], chance = chances[OF_OWN + length], source = OWN, kind = OF_OWN + length;
        int64_t proposed = token, mask = -1, mask_kind = 0;
        if (depth < num_masks) {
            mask = masks[depth];
            mask_kind = OF_MASKS + (on_track + depth) * LEVELS + level(probabilities[depth]);
            if (mask == token) {
                kind = mask_kind = OF_BOTH + LEVELS * (on_track > 0) + level(probabilities[depth]);
                chance = chance > chances[kind] ? chance : chances[kind], source = MASKS;
            } else if (chances[mask_kind] > chance) {
                token = mask, chance = chances[mask_kind], source = MASKS;
            }
        }
        double before = reached;
        reached *= chance;
        if (token < 0 || reached < worth) {
            reached = before;
            break;
        }
        int ends_text = 0;
        for (int64_t i = 0; i < d->num_eos; i++) ends_text |= d->eos[i] == token;
        if (ends_text) {
            expects_eos = 1, reached = before;
            break;
        }
        ends[text->drafts] = before - reached;
        text->chain[text->drafts++] = (Draft){chance, token, source, proposed, kind, mask, mask_kind};
        if (mask != token) on_track = DEPTHS;
        if (passage && text->tokens[passage] == token && passage + 1 < end) {
            passage++;
            length = length < MATCH ? length + 1 : MATCH;
        } else if (from_text) {
            passage = in_context ? map_get(&text->index, pair(context[in_context - 1], token)) : 0, length = 2;
        }
        if (in_context == LONGEST) memmove(context, context + 1, --in_context * sizeof *context);
        context[in_context++] = token;
    }
    ends[text->drafts] = reached;
    return expects_eos;
}

/* Draft for n sequences: drafted has tokens [n, most_drafts], counts [n] and whether an end is expected [n]; ends
[n, most_drafts + 1], zeros behind the last. masks and probabilities: [S, width], of which the first num_masks[slot] of a
row are there. */
void drafter_draft(Drafter *d, const int64_t *slots, const int64_t *most, int64_t n, double worth, const int64_t *masks,
                   const double *probabilities, const int64_t *num_masks, int64_t width, int from_text,
                   int64_t *drafted, double *ends) {
    int64_t m = d->most_drafts, *tokens = drafted, *counts = drafted + n * m, *eos = counts + n;
    memset(ends, 0, n * (m + 1) * sizeof *ends);
    for (int64_t i = 0; i < n; i++) {
        Text *text = d->texts[slots[i]];
        int64_t at = slots[i] * width;
        eos[i] = draft_one(d, text, most[i], worth, masks + at, probabilities + at, num_masks[slots[i]], from_text,
                           ends + i * (m + 1));
        counts[i] = text->drafts;
        for (int64_t j = 0; j < text->drafts; j++) tokens[i * m + j] = text->chain[j].token;
    }
}

/* ---- what is asked of a sequence ---- */

int64_t drafter_length(const Drafter *d, int64_t slot) { return d->texts[slot]->length; }

void drafter_tokens(const Drafter *d, int64_t slot, int64_t *tokens) {
    memcpy(tokens, d->texts[slot]->tokens, d->texts[slot]->length * sizeof *tokens);
}

int64_t drafter_passage(const Drafter *d, int64_t slot, int64_t *length) { return passage_of(d->texts[slot], length); }

/* the chain: its tokens [drafts], and their chances */
int64_t drafter_chain(const Drafter *d, int64_t slot, int64_t *tokens, double *chances) {
    const Text *text = d->texts[slot];
    for (int64_t j = 0; j < text->drafts; j++) tokens[j] = text->chain[j].token, chances[j] = text->chain[j].chance;
    return text->drafts;
}
