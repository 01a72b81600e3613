/* Drafts from text: token for token the same as in plain_drafter.py, ngram_contexts.py, ngrams.py and mixer.py
(c_drafter.py compiles and calls this). */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 255, MATCH = 8, LEVELS = 8, DEPTHS = 16, SOURCES = 3, MASKS = 0, TEXT = 1, OWN = 2 };
enum { TOKEN = 0, BACK = 1, REACH = 128, PARTS = 5, MOST_VOTERS = 16 };
enum { DIFFERENT = 4, STEPS = 1024, SCALE = 32, WIDE = 12 };
enum { TOGETHER = 8 }; /* chains that are drafted together */

static const double DECAY = 0.998, RATE = 0.02, DOUBT = -1.0;

static void *checked(void *memory) {
    if (!memory) abort();
    return memory;
}

/* Return an array of `count` items, which has room for `room` of them, with room for one more. */
static void *with_room(void *array, int64_t count, int64_t *room, size_t size) {
    if (count < *room) return array;
    *room = 2 * *room + 16;
    return checked(realloc(array, *room * size));
}

static inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* ---- a hash table from keys, whose bits are mixed, to values other than 0 ---- */

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

static inline int64_t home_of(const Map *map, uint64_t key) { return (int64_t)(key >> 16 & (uint64_t)(map->room - 1)); }

static inline Entry *entry_of(const Map *map, uint64_t key) { /* the key's entry, or the free one for it */
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

typedef struct { /* small, because every step writes hundreds of them */
    double lean;
    int32_t token;
    int16_t voter, kind;
} Proposal;

typedef struct {
    double chance;
    int64_t token, weights, count;
    Proposal proposals[MOST_VOTERS];
} Draft;

typedef struct {
    int64_t *tokens, *backs, length, room, counted;
    Map index;                       /* by two tokens: where their last occurrence continues */
    Draft *chain;                    /* its drafts, then the decision that was refused */
    int64_t drafts, refused, users;  /* users: references, by its slot and by chains to learn from */
    int64_t counts[2][SOURCES];      /* drafts by their source: verified, and of these accepted */
} Text;

typedef struct {
    Text *text;
    Draft *chain;
    int64_t drafts, refused, begin;
} Verified;

typedef struct { /* as in ngram_contexts.py; part: kind x PARTS + place - 1 */
    int64_t tells, length, count, part[PARTS];
} Context;

typedef struct {
    Map young, old;
    int64_t most, most_drafts, num_eos, dropped, slots, num_verified, room_verified;
    int64_t *eos;
    Context contexts[MOST_VOTERS];
    int64_t num_contexts, voters, of_passages, of_masks;
    double *tried, *right, *chance, *weights; /* weights [2 DIFFERENT, 2 voters + 1] */
    const double *hope, *leans, *chances;
    Text **texts; /* by slot; 0: none */
    Verified *verified;
    Text **left; /* since the last drafter_learn */
    int64_t num_left, room_left;
    Draft **chains; /* memory for chains, to be used again */
    int64_t num_chains, room_chains;
} Drafter;

/* contexts [num_contexts, 3 + 2 PARTS]: what each tells, its length, the number of its parts; the parts' places; the
parts' kinds */
Drafter *drafter_new(int64_t most_entries, int64_t most_drafts, const int64_t *eos, int64_t num_eos,
                     const int64_t *contexts, int64_t num_contexts, double *tried, double *right, double *chance,
                     double *weights, const double *hope, const double *leans, const double *chances) {
    Drafter *d = checked(calloc(1, sizeof *d));
    d->young = map_of(1024), d->old = map_of(16);
    d->most = most_entries, d->most_drafts = most_drafts, d->num_eos = num_eos;
    d->eos = checked(malloc((num_eos + 1) * sizeof *eos));
    memcpy(d->eos, eos, num_eos * sizeof *eos);
    for (int64_t i = 0; i < num_contexts; i++) {
        const int64_t *row = contexts + i * (3 + 2 * PARTS), *place = row + 3, *kind = place + PARTS;
        Context *context = d->contexts + i;
        context->tells = row[0], context->length = row[1], context->count = row[2];
        for (int64_t j = 0; j < row[2]; j++) context->part[j] = kind[j] * PARTS + place[j] - 1;
    }
    d->num_contexts = num_contexts, d->voters = num_contexts + 2;
    d->of_passages = 8 * num_contexts, d->of_masks = d->of_passages + MATCH + 1;
    d->tried = tried, d->right = right, d->chance = chance, d->weights = weights;
    d->hope = hope, d->leans = leans, d->chances = chances;
    return d;
}

static Draft *take_chain(Drafter *d) {
    return d->num_chains ? d->chains[--d->num_chains] : checked(malloc((d->most_drafts + 1) * sizeof(Draft)));
}

static void keep_chain(Drafter *d, Draft *chain) {
    d->chains = with_room(d->chains, d->num_chains, &d->room_chains, sizeof *d->chains);
    d->chains[d->num_chains++] = chain;
}

static void release(Drafter *d, Text *text) {
    if (--text->users) return;
    free(text->tokens), free(text->backs);
    map_free(&text->index);
    keep_chain(d, text->chain);
    free(text);
}

void drafter_leave(Drafter *d, int64_t slot) {
    d->left = with_room(d->left, d->num_left, &d->room_left, sizeof *d->left);
    d->left[d->num_left++] = d->texts[slot];
    d->texts[slot] = 0;
}

void drafter_free(Drafter *d) {
    for (int64_t slot = 0; slot < d->slots; slot++)
        if (d->texts[slot]) drafter_leave(d, slot);
    for (int64_t i = 0; i < d->num_left; i++) release(d, d->left[i]);
    for (int64_t i = 0; i < d->num_verified; i++) {
        keep_chain(d, d->verified[i].chain);
        release(d, d->verified[i].text);
    }
    for (int64_t i = 0; i < d->num_chains; i++) free(d->chains[i]);
    map_free(&d->young);
    map_free(&d->old);
    free(d->eos), free(d->texts), free(d->verified), free(d->left), free(d->chains), free(d);
}

static inline uint64_t pair(int64_t a, int64_t b) { return mix((uint64_t)a << 32 | (uint32_t)b); }

/* Return how far before token `number` the same token last occurred; 0: not within REACH tokens. */
static int64_t back_of(const int64_t *tokens, int64_t number) {
    int64_t most = number < REACH ? number : REACH, token = tokens[number], back = 1;
    for (; back + 7 <= most; back += 8) { /* eight at a time, in vectors */
        const int64_t *eight = tokens + number - back - 7;
        int64_t found = 0;
        for (int i = 0; i < 8; i++) found |= eight[i] == token;
        if (found) break;
    }
    for (; back <= most; back++)
        if (tokens[number - back] == token) return back;
    return 0;
}

/* Write a token as number `number` of the text, which has room for it, without indexing the passage before it. */
static inline void put(Text *text, int64_t number, int64_t token) {
    text->tokens[number] = token;
    text->backs[number] = back_of(text->tokens, number);
}

static void make_room(Text *text, int64_t count) {
    if (text->length + count <= text->room) return;
    text->room = 2 * (text->length + count);
    text->tokens = checked(realloc(text->tokens, text->room * sizeof *text->tokens));
    text->backs = checked(realloc(text->backs, text->room * sizeof *text->backs));
}

static void extend(Text *text, const int64_t *tokens, int64_t count, int indexed) {
    make_room(text, count);
    for (int64_t i = 0; i < count; i++) {
        int64_t n = text->length;
        if (indexed) {
            if (n > 1) map_put(&text->index, pair(text->tokens[n - 2], text->tokens[n - 1]), n);
            put(text, n, tokens[i]);
        } else {
            text->tokens[n] = tokens[i], text->backs[n] = 0;
        }
        text->length++;
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
    text->chain = take_chain(d);
    int64_t skipped = count > remembered ? count - remembered : 0;
    extend(text, prompt, skipped, 0);
    extend(text, prompt + skipped, count - skipped, 1);
}

/* Take what a step wrote. The text in slots[i], if there is one, gets the first counts[i] tokens of row i of
written [n, wide]. What masks predicted after it is row i of token and bits [n, width], up to the first token -1. It
becomes row slots[i] of the tables mask_token and mask_probability [S, reach], and its length mask_counts[slots[i]].
With width 0 these do not change. */
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
        d->verified = with_room(d->verified, d->num_verified, &d->room_verified, sizeof *d->verified);
        d->verified[d->num_verified++] = (Verified){text, text->chain, text->drafts, text->refused, text->length};
        text->users++;
        text->chain = take_chain(d);
        text->drafts = text->refused = 0;
        extend(text, written + i * wide, counts[i], 1);
    }
}

/* ---- the table ---- */

/* Set the key of each context at the place `end`; 0: the text before it is too short for the context. */
static void keys_of(const Drafter *d, const int64_t *tokens, const int64_t *backs, int64_t end, uint64_t *keys) {
    uint64_t parts[2 * PARTS] = {0};
    for (int64_t j = 0; j < PARTS && j < end; j++) {
        parts[j] = (uint64_t)tokens[end - 1 - j] * mix(2 * j + 1);
        parts[PARTS + j] = (uint64_t)backs[end - 1 - j] * mix(2 * j + 2);
    }
    for (int64_t i = 0; i < d->num_contexts; i++) {
        const Context *context = d->contexts + i;
        if (end < context->length) {
            keys[i] = 0;
            continue;
        }
        uint64_t key = (uint64_t)(i + 1) << 40;
        for (int64_t j = 0; j < context->count; j++) key += parts[context->part[j]];
        keys[i] = mix(key) | 1;
        __builtin_prefetch(d->young.entries + home_of(&d->young, keys[i])); /* all entries are fetched at once */
        if (d->old.count) __builtin_prefetch(d->old.entries + home_of(&d->old, keys[i]));
    }
}

static void count_tokens(Drafter *d, const int64_t *tokens, const int64_t *backs, int64_t count, int64_t begin) {
    for (int64_t number = begin; number < count; number++) {
        uint64_t keys[MOST_VOTERS];
        keys_of(d, tokens, backs, number, keys);
        for (int64_t i = 0; i < d->num_contexts; i++) {
            if (!keys[i]) continue;
            int64_t came = d->contexts[i].tells == TOKEN ? tokens[number] : backs[number];
            Entry *young = entry_of(&d->young, keys[i]);
            int64_t entry = young->value;
            int found = entry != 0;
            if (!found) entry = map_get(&d->old, keys[i]);
            if (!entry) entry = came << 8 | 1;
            else if (entry >> 8 == came) entry += (entry & COUNT) < COUNT;
            else entry = (entry & COUNT) > 1 ? entry - 1 : (came << 8 | 1);
            if (found) young->value = entry;
            else map_put(&d->young, keys[i], entry);
        }
    }
    if (d->young.count > d->most) {
        d->dropped |= d->old.count > 0;
        map_free(&d->old);
        d->old = d->young;
        d->young = map_of(1024);
    }
}

void drafter_remember(Drafter *d, const int64_t *tokens, int64_t count, int64_t begin) {
    int64_t *backs = checked(malloc((count + 1) * sizeof *backs));
    for (int64_t number = 0; number < count; number++) backs[number] = back_of(tokens, number);
    count_tokens(d, tokens, backs, count, begin);
    free(backs);
}

static int64_t after(Drafter *d, uint64_t key) {
    int64_t entry = map_get(&d->young, key);
    if (!entry && d->old.count && (entry = map_get(&d->old, key))) map_put(&d->young, key, entry);
    return entry;
}

int64_t drafter_dropped(const Drafter *d) { return d->dropped; }

/* ---- drafting, and learning from it ---- */

static int level(double probability) {
    double rest = 1.0 - probability;
    int halved = 0;
    while (rest < 0.5 && halved < LEVELS - 1) rest *= 2, halved++;
    return halved;
}

static int bits_of(int64_t count) { /* its length in bits, at most 7 */
    int bits = 64 - __builtin_clzll((unsigned long long)count);
    return bits < 7 ? bits : 7;
}

static void propose(const Drafter *d, Draft *draft, int64_t token, int64_t voter, int64_t kind) {
    int64_t step = (int64_t)(d->chance[kind] * STEPS);
    double lean = d->leans[step < STEPS - 1 ? step : STEPS - 1];
    draft->proposals[draft->count++] = (Proposal){lean, (int32_t)token, (int16_t)voter, (int16_t)kind};
}

static inline double at_least(double value, double least) { return value > least ? value : least; }

/* Choose the token with the most support among the draft's proposals, as `Mixer.decide` does. */
static void decide(const Drafter *d, Draft *draft) {
    int64_t tokens[MOST_VOTERS], different = 0, of[MOST_VOTERS];
    double votes[MOST_VOTERS] = {0}, against = 0.0;
    for (int64_t i = 0; i < draft->count; i++) {
        int64_t j = 0;
        while (j < different && tokens[j] != draft->proposals[i].token) j++;
        if (j == different) tokens[different++] = draft->proposals[i].token;
        of[i] = j;
    }
    draft->token = -1, draft->chance = 0.0, draft->weights = 0;
    if (!different) return;
    draft->weights = (different < DIFFERENT ? different : DIFFERENT) - 1 + DIFFERENT * (draft->count > d->voters / 2);
    const double *weights = d->weights + draft->weights * (2 * d->voters + 1);
    for (int64_t i = 0; i < draft->count; i++) {
        const Proposal *one = draft->proposals + i;
        double doubt = weights[d->voters + one->voter] * at_least(one->lean, DOUBT);
        votes[of[i]] += weights[one->voter] * one->lean + doubt;
        against += doubt;
    }
    int64_t best = 0;
    for (int64_t j = 1; j < different; j++)
        if (votes[j] > votes[best]) best = j;
    double total = weights[2 * d->voters] + votes[best] - against;
    total = total > WIDE ? WIDE : at_least(total, -WIDE);
    int64_t step = (int64_t)((total + WIDE) * SCALE), last = 2 * WIDE * SCALE - 1;
    draft->token = tokens[best], draft->chance = d->chances[step < last ? step : last];
}

static void learn_one(Drafter *d, const Draft *draft, int64_t token) {
    double *weights = d->weights + draft->weights * (2 * d->voters + 1);
    double step = RATE * ((draft->token == token) - draft->chance);
    for (int64_t i = 0; i < draft->count; i++) {
        const Proposal *one = draft->proposals + i;
        d->tried[one->kind] = DECAY * d->tried[one->kind] + 1;
        d->right[one->kind] = DECAY * d->right[one->kind] + (one->token == token);
        d->chance[one->kind] = (d->right[one->kind] + d->hope[one->kind]) / (d->tried[one->kind] + 1);
        int agrees = one->token == draft->token;
        double *weight = weights + (agrees ? one->voter : d->voters + one->voter);
        *weight = at_least(*weight + step * (agrees ? one->lean : -at_least(one->lean, DOUBT)), 0.0);
    }
    weights[2 * d->voters] += step * 0.5;
}

static int64_t source_of(const Drafter *d, const Draft *draft) {
    int64_t source = TEXT;
    double best = -1e9;
    for (int64_t i = 0; i < draft->count; i++) {
        const Proposal *one = draft->proposals + i;
        if (one->token != draft->token) continue;
        if (one->voter == d->num_contexts + 1) return MASKS;
        if (one->lean > best) {
            best = one->lean;
            source = one->voter < d->num_contexts && d->contexts[one->voter].tells == TOKEN ? TEXT : OWN;
        }
    }
    return source;
}

int64_t drafter_num_verified(const Drafter *d) { return d->num_verified; }

/* Set the tokens and sources [drafts] of a chain that waits for drafter_learn, and return the number of its drafts. */
int64_t drafter_verifying(const Drafter *d, int64_t number, int64_t *tokens, int64_t *sources) {
    const Verified *one = d->verified + number;
    for (int64_t j = 0; j < one->drafts; j++)
        tokens[j] = one->chain[j].token, sources[j] = source_of(d, one->chain + j);
    return one->drafts;
}

/* Learn from the chains that wait. The numbers of their drafts, and of their accepted drafts, by source, are added to
total [2, SOURCES]. of_left [n, 2, SOURCES] is set to the same numbers over all steps, for each text that was removed
since the last call, in the order of removal. */
void drafter_learn(Drafter *d, int64_t *total, int64_t *of_left) {
    for (int64_t i = 0; i < d->num_verified; i++) {
        Verified *one = d->verified + i;
        Text *text = one->text;
        int64_t left = text->length - one->begin;
        int64_t right = 0;
        for (; right < one->drafts + one->refused && right < left; right++) {
            int64_t token = text->tokens[one->begin + right];
            learn_one(d, one->chain + right, token);
            if (right == one->drafts || one->chain[right].token != token) break;
        }
        for (int64_t j = 0; j < one->drafts; j++) {
            int64_t source = source_of(d, one->chain + j);
            text->counts[0][source]++, total[source]++;
            if (j < right) text->counts[1][source]++, total[SOURCES + source]++;
        }
        count_tokens(d, text->tokens, text->backs, text->length, text->counted);
        text->counted = text->length;
        keep_chain(d, one->chain);
        release(d, text);
    }
    d->num_verified = 0;
    for (int64_t i = 0; i < d->num_left; i++) {
        memcpy(of_left + i * 2 * SOURCES, d->left[i]->counts, sizeof d->left[i]->counts);
        release(d, d->left[i]);
    }
    d->num_left = 0;
}

/* Return the place after the last earlier occurrence of the tokens that end the text's first n tokens; 0 if there is
none. Set `length` to the number of tokens that match. */
static int64_t passage_of(const Text *text, int64_t n, int64_t *length) {
    const int64_t *tokens = text->tokens;
    int64_t at;
    *length = 0;
    if (n < 2) return 0;
    at = map_get(&text->index, pair(tokens[n - 2], tokens[n - 1]));
    *length = 2;
    while (at && *length < MATCH && at > *length && tokens[at - *length - 1] == tokens[n - *length - 1]) ++*length;
    return at;
}

/* Add to the draft what the table and the text itself propose after the text's first `end` tokens. The keys are those
of keys_of at `end`. */
static void propose_all(Drafter *d, const Text *text, int64_t end, const uint64_t *keys, Draft *draft) {
    int64_t length;
    for (int64_t i = 0; i < d->num_contexts; i++) {
        int64_t entry = keys[i] ? after(d, keys[i]) : 0, came = entry >> 8;
        if (!entry) continue;
        if (d->contexts[i].tells == BACK) {
            if (came == 0 || came > end) continue;
            came = text->tokens[end - came];
        }
        propose(d, draft, came, i, 8 * i + bits_of(entry & COUNT));
    }
    int64_t passage = passage_of(text, end, &length);
    if (passage) propose(d, draft, text->tokens[passage], d->num_contexts, d->of_passages + length);
}

static int is_eos(const Drafter *d, int64_t token) {
    for (int64_t i = 0; i < d->num_eos; i++)
        if (d->eos[i] == token) return 1;
    return 0;
}

/* A chain that is being drafted. */
typedef struct {
    Text *text;
    const int64_t *masks;
    const double *probabilities;
    double *ends, reached;
    int64_t num_masks, most, on_track, expects_eos, going;
    uint64_t keys[MOST_VOTERS];
} Chain;

/* Draft the token at a depth of a chain, or end the chain before it. */
static void draft_one(Drafter *d, Chain *chain, int64_t depth, double worth, int from_text) {
    Text *text = chain->text;
    Draft *draft = text->chain + depth;
    int64_t mask = -1;
    draft->count = 0;
    if (from_text) propose_all(d, text, text->length + depth, chain->keys, draft);
    if (depth < chain->num_masks) {
        mask = chain->masks[depth];
        int64_t kind = chain->on_track + (depth < DEPTHS ? depth : DEPTHS - 1);
        propose(d, draft, mask, d->num_contexts + 1, d->of_masks + kind * LEVELS + level(chain->probabilities[depth]));
    }
    decide(d, draft);
    double then = chain->reached * draft->chance;
    int ends_text = is_eos(d, draft->token);
    if (draft->token < 0 || then < worth || ends_text) {
        chain->expects_eos = ends_text && then >= worth;
        text->refused = 1;
        chain->going = 0;
        return;
    }
    chain->ends[depth] = chain->reached - then;
    put(text, text->length + depth, draft->token);
    text->drafts++;
    chain->reached = then;
    if (draft->token != mask) chain->on_track = DEPTHS;
    chain->going = depth + 1 < chain->most;
}

/* Set the keys of what follows the text's first `end` tokens, and begin to fetch all that `propose_all` reads there. */
static void look_ahead(const Drafter *d, const Text *text, int64_t end, uint64_t *keys) {
    keys_of(d, text->tokens, text->backs, end, keys);
    if (end < 2) return;
    uint64_t key = pair(text->tokens[end - 2], text->tokens[end - 1]);
    __builtin_prefetch(text->index.entries + home_of(&text->index, key));
}

/* Draft n chains together, a depth at a time: the table's entries for all of them are fetched from memory at once. */
static void draft_together(Drafter *d, Chain *chains, int64_t n, double worth, int from_text) {
    for (Chain *chain = chains; chain < chains + n; chain++) {
        Text *text = chain->text;
        text->drafts = text->refused = 0;
        make_room(text, d->most_drafts + 1);
        if (!from_text && chain->num_masks < chain->most) chain->most = chain->num_masks;
        chain->reached = 1.0, chain->on_track = chain->expects_eos = 0, chain->going = chain->most > 0;
    }
    int64_t going = 1;
    for (int64_t depth = 0; going; depth++) {
        going = 0;
        for (Chain *chain = chains; from_text && chain < chains + n; chain++)
            if (chain->going) look_ahead(d, chain->text, chain->text->length + depth, chain->keys);
        for (Chain *chain = chains; chain < chains + n; chain++) {
            if (chain->going) draft_one(d, chain, depth, worth, from_text);
            going |= chain->going;
        }
    }
    for (Chain *chain = chains; chain < chains + n; chain++) chain->ends[chain->text->drafts] = chain->reached;
}

/* Draft for the running sequences that are due, and return how many they are, n. due, done, limit and complete are [S].
places [2, 4] are where `State.storage` has an answer, a chain, the number of its drafts and whether an end-of-text is
expected: those of slot 0, and how far apart adjacent slots are. masks and probabilities are [S, width]; the first
num_masks[slot] of a row are valid. With m being most_drafts, made is set to, one after the other: the slots [n], the most
drafts of each [n], drafts [n], whether an end-of-text is expected [n], tokens [n, m], and what changes in `State.storage`
[2, n (2 m + 2)], numbers in it and their new values. ends [n, m + 1] is set to the probabilities that each chain ends at
each depth, followed by zeros. */
int64_t drafter_draft_due(Drafter *d, const uint8_t *due, const int64_t *done, const int64_t *limit,
                          const int64_t *complete, int64_t S, const int64_t *places, double worth, const int64_t *masks,
                          const double *probabilities, const int64_t *num_masks, int64_t width, int from_text,
                          int64_t *made, double *ends) {
    int64_t n = 0, m = d->most_drafts, i = 0;
    for (int64_t slot = 0; slot < S; slot++) n += due[slot] && !done[slot];
    int64_t *slots = made, *most = slots + n, *counts = most + n, *eos = counts + n, *tokens = eos + n;
    int64_t *cells = tokens + n * m, *of_chains = cells + n * m, *counted = of_chains + n * m;
    int64_t *values = counted + 2 * n;
    const int64_t *step = places + 4;
    memset(ends, 0, n * (m + 1) * sizeof *ends);
    memset(tokens, 0, n * m * sizeof *tokens);
    for (int64_t slot = 0; slot < S; slot++)
        if (due[slot] && !done[slot]) slots[i++] = slot;
    for (int64_t first = 0; first < n; first += TOGETHER) {
        Chain chains[TOGETHER];
        int64_t some = n - first < TOGETHER ? n - first : TOGETHER;
        for (i = first; i < first + some; i++) {
            int64_t slot = slots[i], room = limit[slot] - 1 - complete[slot], at = slot * width;
            most[i] = room < m ? room : m;
            chains[i - first] = (Chain){.text = d->texts[slot], .masks = masks + at, .probabilities = probabilities + at,
                                        .ends = ends + i * (m + 1), .num_masks = num_masks[slot], .most = most[i]};
        }
        draft_together(d, chains, some, worth, from_text);
        for (i = first; i < first + some; i++) {
            int64_t slot = slots[i];
            const Text *text = chains[i - first].text;
            counts[i] = text->drafts, eos[i] = chains[i - first].expects_eos;
            for (int64_t j = 0; j < text->drafts; j++) tokens[i * m + j] = text->chain[j].token;
            for (int64_t j = 0; j < m; j++) {
                cells[i * m + j] = places[0] + slot * step[0] + complete[slot] + j;
                of_chains[i * m + j] = places[1] + slot * step[1] + j;
            }
            counted[i] = places[2] + slot * step[2], counted[n + i] = places[3] + slot * step[3];
        }
    }
    memcpy(values, tokens, n * m * sizeof *values);
    memcpy(values + n * m, tokens, n * m * sizeof *values);
    memcpy(values + 2 * n * m, counts, 2 * n * sizeof *values);
    return n;
}

/* ---- queries about one sequence ---- */

/* Set what text proposes after the tokens in a slot and n more: at most MOST_VOTERS tokens, and the chance of each.
Return how many there are. */
int64_t drafter_proposed(Drafter *d, int64_t slot, const int64_t *more, int64_t n, int64_t *tokens, double *chances) {
    Text *text = d->texts[slot];
    Draft draft = {.count = 0};
    make_room(text, n);
    for (int64_t i = 0; i < n; i++) put(text, text->length + i, more[i]);
    uint64_t keys[MOST_VOTERS];
    keys_of(d, text->tokens, text->backs, text->length + n, keys);
    propose_all(d, text, text->length + n, keys, &draft);
    for (int64_t i = 0; i < draft.count; i++)
        tokens[i] = draft.proposals[i].token, chances[i] = d->chance[draft.proposals[i].kind];
    return draft.count;
}

/* Set the tokens [drafts] of the chain and their chances, and return the number of its drafts. */
int64_t drafter_chain(const Drafter *d, int64_t slot, int64_t *tokens, double *chances) {
    const Text *text = d->texts[slot];
    for (int64_t j = 0; j < text->drafts; j++) tokens[j] = text->chain[j].token, chances[j] = text->chain[j].chance;
    return text->drafts;
}
