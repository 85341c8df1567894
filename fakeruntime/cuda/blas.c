/* What cuBLAS and cuBLASLt answer by more than that it went well; their kernels do nothing either. */
#include <string.h>

enum { HEURISTIC_BYTES = 96 };

static char object;

static int create(void **handle) {
    *handle = &object;
    return 0;
}

int cublasCreate_v2(void **handle) { return create(handle); }
int cublasLtCreate(void **handle) { return create(handle); }
int cublasLtMatmulDescCreate(void **descriptor) { return create(descriptor); }
int cublasLtMatrixLayoutCreate(void **layout) { return create(layout); }
int cublasLtMatmulPreferenceCreate(void **preference) { return create(preference); }

/* One algorithm, which needs no workspace. */
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int requested, void *results, int *found) {
    memset(results, 0, HEURISTIC_BYTES);
    *found = 1;
    return 0;
}
