/* A free and an allocation, repeatedly, with 100 live blocks of 64 sizes: what a program pays at lowtide's C interface.
 *
 *     pair COUNT
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "lowtide.h"

enum { LIVE = 100, SIZES = 64 };

static uint64_t next(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void *allocate(size_t size) {
    void *memory = lowtide_malloc(size, 0, NULL);
    if (!memory) {
        fprintf(stderr, "%s\n", lowtide_last_error());
        exit(1);
    }
    return memory;
}

int main(int argc, char **argv) {
    long count = argc > 1 ? atol(argv[1]) : 0;
    uint64_t state = 88172645463325252u;
    void *live[LIVE];
    size_t sizes[LIVE];
    for (int index = 0; index < LIVE; index++) {
        sizes[index] = 512 * (1 + next(&state) % SIZES);
        live[index] = allocate(sizes[index]);
    }
    for (; count > 0; count--) {
        int index = (int)(next(&state) % LIVE);
        lowtide_free(live[index], sizes[index], 0, NULL);
        live[index] = allocate(sizes[index]);
    }
    return 0;
}
