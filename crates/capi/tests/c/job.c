/* A job that lowtide writes files for. The argument says which: "memory", "exhaust", or "record" and a path. What it
 * prints is what lowtide said. JOB_FILES_UID gives its files to another user, as some file systems do, and JOB_FILE_BYTES
 * is how much of a file fits on the disk once memory runs out. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/resource.h>

#include "lowtide.h"

static void require(bool holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, lowtide_last_error());
        exit(1);
    }
}

static void use_memory(void) {
    void *memory = NULL;
    require(lowtide_allocate(1 << 20, 0, NULL, &memory) == LOWTIDE_STATUS_OK, "allocate");
    require(lowtide_deallocate(memory) == LOWTIDE_STATUS_OK, "deallocate");
}

static void fill_the_disk(const char *left_bytes) {
    struct rlimit limit = {(rlim_t)atoi(left_bytes), RLIM_INFINITY};
    signal(SIGXFSZ, SIG_IGN);
    require(setrlimit(RLIMIT_FSIZE, &limit) == 0, "limit");
}

int main(int count, char **arguments) {
    const char *files_uid = getenv("JOB_FILES_UID");
    if (files_uid != NULL) {
        setfsuid((uid_t)atoi(files_uid));
    }
    require(count > 1 && lowtide_init(0) == LOWTIDE_STATUS_OK, "init");
    if (strcmp(arguments[1], "record") == 0 && lowtide_record_start(arguments[2], false) != LOWTIDE_STATUS_OK) {
        puts(lowtide_last_error());
    }
    use_memory();
    if (strcmp(arguments[1], "record") == 0) {
        require(lowtide_record_stop() == LOWTIDE_STATUS_OK, "stop");
    }
    if (strcmp(arguments[1], "exhaust") == 0) {
        const char *left_bytes = getenv("JOB_FILE_BYTES");
        if (left_bytes != NULL) {
            fill_the_disk(left_bytes);
        }
        void *memory = NULL;
        require(lowtide_allocate((size_t)1 << 30, 0, NULL, &memory) == LOWTIDE_STATUS_OUT_OF_MEMORY, "exhaust");
        puts(lowtide_last_error());
    }
    return 0;
}
