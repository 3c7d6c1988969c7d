/* tree.py: the root over fingerprints, 32 children a node. */
#ifndef HOLTER_TREE_H
#define HOLTER_TREE_H

#include <stddef.h>
#include <stdint.h>

static inline uint64_t mix64(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

/* Writes the parents of these nodes over the first of them; returns how many there are. */
static inline size_t tree_level(uint64_t *nodes, size_t count, size_t fanout)
{
    size_t num_parents = count ? (count + fanout - 1) / fanout : 1;
    for (size_t parent = 0; parent < num_parents; parent++) {
        size_t begin = parent * fanout, end = begin + fanout < count ? begin + fanout : count;
        uint64_t sum = end - begin;
        for (size_t k = begin; k < end; k++)
            sum += mix64(nodes[k] ^ (k + 1) * 0x9E3779B97F4A7C15);
        nodes[parent] = mix64(sum);
    }
    return num_parents;
}

/* The root; `nodes` has room for one at least, and is used up. */
static inline uint64_t tree_root(uint64_t *nodes, size_t count, size_t fanout)
{
    do
        count = tree_level(nodes, count, fanout);
    while (count > 1);
    return nodes[0];
}

#endif
