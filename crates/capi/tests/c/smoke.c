/* Calls liblowtide.so as a C program does. The argument is the driver to run on, fakecuda. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lowtide.h"

#define REQUIRE(condition)                                                                    \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, lowtide_last_error()); \
            exit(1);                                                                          \
        }                                                                                     \
    } while (0)

static long long figure(int device, const char *key) {
    size_t count = 0;
    REQUIRE(lowtide_memory_stats(device, NULL, 0, &count) == LOWTIDE_STATUS_TOO_SMALL);
    lowtide_memory_stat *stats = calloc(count, sizeof *stats);
    REQUIRE(stats != NULL);
    REQUIRE(lowtide_memory_stats(device, stats, count, &count) == LOWTIDE_STATUS_OK);
    long long value = -1;
    for (size_t index = 0; index < count; index++) {
        if (strcmp(stats[index].key, key) == 0) {
            value = (long long)stats[index].value;
        }
    }
    free(stats);
    return value;
}

int main(int argc, char **argv) {
    REQUIRE(lowtide_abi_version() == LOWTIDE_ABI_VERSION);
    REQUIRE(strlen(lowtide_version()) > 0);
    REQUIRE(argc == 2 && dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) != NULL);

    REQUIRE(lowtide_configure("no such", NULL) == LOWTIDE_STATUS_CONFIG);
    REQUIRE(strstr(lowtide_last_error(), "no such") != NULL);
    REQUIRE(lowtide_configure("caching", "max_split_size_mb:64") == LOWTIDE_STATUS_OK);
    REQUIRE(lowtide_init(1) == LOWTIDE_STATUS_OK);

    void *memory = lowtide_malloc(1000, 0, NULL);
    REQUIRE(memory != NULL);
    memset(memory, 7, 1000);
    REQUIRE(figure(0, "allocated_bytes.all.current") == 1024);
    REQUIRE(figure(0, "max_split_size") == 64LL << 20);
    lowtide_free(memory, 1000, 0, NULL);

    void *other = NULL;
    REQUIRE(lowtide_allocate(1000, 0, NULL, &other) == LOWTIDE_STATUS_OK);
    REQUIRE(other == memory && ((char *)other)[999] == 7);
    REQUIRE(lowtide_allocate((size_t)1 << 50, 0, NULL, &memory) == LOWTIDE_STATUS_OUT_OF_MEMORY);
    REQUIRE(memory == other);
    REQUIRE(lowtide_deallocate(other) == LOWTIDE_STATUS_OK);
    REQUIRE(lowtide_deallocate(other) == LOWTIDE_STATUS_NOT_ALLOCATED);

    lowtide_mempool pool = {0, 1};
    REQUIRE(lowtide_begin_allocate_to_pool(0, pool, NULL, NULL, NULL) == LOWTIDE_STATUS_OK);
    other = lowtide_malloc(1000, 0, NULL);
    REQUIRE(other != NULL);
    REQUIRE(figure(0, "reserved_bytes_by_private_pools.0_1.all.current") == 2 << 20);
    REQUIRE(lowtide_end_allocate_to_pool(0, pool) == LOWTIDE_STATUS_OK);
    lowtide_free(other, 1000, 0, NULL);
    REQUIRE(lowtide_release_pool(0, pool) == LOWTIDE_STATUS_OK);

    void *bytes = NULL;
    size_t length = 0;
    REQUIRE(lowtide_snapshot(&bytes, &length) == LOWTIDE_STATUS_OK && length > 0);
    lowtide_release_bytes(bytes);
    REQUIRE(lowtide_reset() == LOWTIDE_STATUS_OK);
    REQUIRE(figure(0, "reserved_bytes.all.current") == 0);
    return 0;
}
