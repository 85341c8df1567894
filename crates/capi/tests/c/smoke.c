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

static int events = 0;
static void count_event(void *context, const lowtide_event *event) {
    REQUIRE(context == &events && event->device == 0);
    events++;
}

static void count_block(void *context, void *memory, size_t size, void *stream) {
    REQUIRE(memory != NULL && size > 0 && stream == NULL);
    ++*(int *)context;
}

static void count_segment(void *context, const lowtide_segment *segment, const lowtide_block *blocks, size_t count) {
    REQUIRE(count > 0 && blocks[0].address == segment->address);
    ++*(int *)context;
}

static bool free_nothing(void *context, int device) {
    ++*(int *)context;
    return device < 0;
}

static void *give(void *context, size_t size, int device, void *stream) {
    (void)context, (void)device, (void)stream;
    return malloc(size);
}

static void take(void *context, void *memory, size_t size, int device) {
    (void)context, (void)size, (void)device;
    free(memory);
}

static void end(void *context) { ++*(int *)context; }

static void watch(void) {
    int shortages = 0, segments = 0;
    REQUIRE(lowtide_observe_events(count_event, &events) == LOWTIDE_STATUS_OK);
    REQUIRE(lowtide_on_shortage(free_nothing, &shortages) == LOWTIDE_STATUS_OK);
    void *memory = lowtide_malloc(30 << 20, 0, NULL);
    REQUIRE(memory != NULL && events == 2 && shortages == 1);
    REQUIRE(lowtide_visit_segments(0, count_segment, &segments) == LOWTIDE_STATUS_OK && segments > 0);
    lowtide_allocation allocation;
    REQUIRE(lowtide_find_allocation(memory, &allocation) == LOWTIDE_STATUS_OK);
    REQUIRE(allocation.size == 30 << 20 && allocation.pool.user == 0);
    lowtide_free(memory, 30 << 20, 0, NULL);
    uint64_t size = 0;
    REQUIRE(lowtide_largest_free(0, &size) == LOWTIDE_STATUS_OK && size >= 30 << 20);
    REQUIRE(lowtide_observe_events(NULL, NULL) == LOWTIDE_STATUS_OK);
    REQUIRE(lowtide_on_shortage(NULL, NULL) == LOWTIDE_STATUS_OK);
    REQUIRE(strcmp(lowtide_config(), "caching:max_split_size_mb:64") == 0);
    REQUIRE(lowtide_reconfigure("expandable_segments:True") == LOWTIDE_STATUS_OK);
    REQUIRE(strcmp(lowtide_config(), "caching:expandable_segments:True") == 0);
}

static void restore(void) {
    lowtide_mempool pool = {0, 2};
    int ended = 0, freed = 0, allocated = 0, count = 0;
    REQUIRE(lowtide_retain_pool(0, pool) == LOWTIDE_STATUS_OK);
    REQUIRE(lowtide_set_pool_source(0, pool, give, take, &ended, end) == LOWTIDE_STATUS_OK);
    REQUIRE(lowtide_begin_allocate_to_pool(0, pool, NULL, NULL, NULL) == LOWTIDE_STATUS_OK);
    void *memory = lowtide_malloc(1000, 0, NULL);
    lowtide_checkpoint *checkpoint = NULL;
    REQUIRE(lowtide_checkpoint_pool(0, pool, &checkpoint) == LOWTIDE_STATUS_OK);
    void *other = lowtide_malloc(2000, 0, NULL);
    REQUIRE(memory != NULL && other != NULL);
    REQUIRE(lowtide_restore_pool(0, checkpoint, count_block, NULL, &freed) == LOWTIDE_STATUS_OK);
    REQUIRE(lowtide_restore_pool(0, checkpoint, NULL, count_block, &allocated) == LOWTIDE_STATUS_OK);
    REQUIRE(freed == 2 && allocated == 1);
    lowtide_release_checkpoint(checkpoint);
    bool is_equal = false;
    REQUIRE(lowtide_check_live(0, pool, &memory, 1, &is_equal) == LOWTIDE_STATUS_OK && is_equal);
    lowtide_free(memory, 1000, 0, NULL);
    REQUIRE(lowtide_end_allocate_to_pool(0, pool) == LOWTIDE_STATUS_OK);
    REQUIRE(lowtide_pool_use_count(0, pool, &count) == LOWTIDE_STATUS_OK && count == 2);
    REQUIRE(lowtide_release_pool(0, pool) == LOWTIDE_STATUS_OK);
    REQUIRE(lowtide_release_pool(0, pool) == LOWTIDE_STATUS_OK);
    REQUIRE(lowtide_empty_pool(0, pool) == LOWTIDE_STATUS_OK && ended == 1);
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
    lowtide_out_of_memory figures;
    REQUIRE(lowtide_last_out_of_memory(&figures) == LOWTIDE_STATUS_OK);
    REQUIRE(figures.requested == (uint64_t)1 << 50 && figures.allocated == 1024);
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

    watch();
    restore();

    void *bytes = NULL;
    size_t length = 0;
    REQUIRE(lowtide_snapshot(&bytes, &length) == LOWTIDE_STATUS_OK && length > 0);
    lowtide_release_bytes(bytes);
    REQUIRE(lowtide_reset() == LOWTIDE_STATUS_OK);
    REQUIRE(figure(0, "reserved_bytes.all.current") == 0);
    return 0;
}
