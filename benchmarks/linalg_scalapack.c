/* Times ScaLAPACK routines on random matrices: linalg_scalapack ROWS COLUMNS BLOCK N REPEATS OPERATION...
 *
 * Operations: gemm (PDGEMM), cholesky (PDPOTRF, lower), qr (PDGEQRF and PDORGQR: Q is formed), svd (PDGESVD, values and vectors).
 * Prints one line of JSON for each operation and repeat: seconds between two barriers, CPU-seconds of all processes between them (with
 * what they spend waiting for messages), and the scaled residual. */
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

extern void Cblacs_get(int, int, int *);
extern void Cblacs_gridinit(int *, const char *, int, int);
extern void Cblacs_gridinfo(int, int *, int *, int *, int *);
extern void Cblacs_gridexit(int);
extern int numroc_(const int *, const int *, const int *, const int *, const int *);
extern void descinit_(int *, const int *, const int *, const int *, const int *, const int *, const int *, const int *, const int *, int *);
extern void pdgemm_(const char *, const char *, const int *, const int *, const int *, const double *, const double *, const int *, const int *, const int *, const double *, const int *, const int *, const int *, const double *, double *, const int *, const int *, const int *);
extern void pdpotrf_(const char *, const int *, double *, const int *, const int *, const int *, int *);
extern void pdgeqrf_(const int *, const int *, double *, const int *, const int *, const int *, double *, double *, const int *, int *);
extern void pdorgqr_(const int *, const int *, const int *, double *, const int *, const int *, const int *, const double *, double *, const int *, int *);
extern void pdgesvd_(const char *, const char *, const int *, const int *, double *, const int *, const int *, const int *, double *, double *, const int *, const int *, const int *, double *, const int *, const int *, const int *, double *, const int *, int *);
extern double pdlange_(const char *, const int *, const int *, const double *, const int *, const int *, const int *, double *);

static const int one = 1, zero = 0;
static const double done = 1.0, dzero = 0.0, minus = -1.0;
static int context, rank, grid_row, grid_column, grid_rows, grid_columns, n, block, local_rows, local_columns, desc[9];
static size_t count;

/* A value that depends on its global index alone. */
static double value(int i, int j) {
    unsigned long long x = (unsigned long long)i * 2654435761ULL + (unsigned long long)j * 40503ULL + 88172645463325252ULL;
    x ^= x << 13; x ^= x >> 7; x ^= x << 17;
    x *= 2685821657736338717ULL; x ^= x >> 32;
    return (double)(x & 0xffffffff) / 4294967296.0 - 0.5;
}

static int global(int local, int process, int processes) { return (local / block * processes + process) * block + local % block; }

static void fill(double *a, int positive) {
    for (int c = 0; c < local_columns; c++)
        for (int r = 0; r < local_rows; r++) {
            int i = global(r, grid_row, grid_rows), j = global(c, grid_column, grid_columns);
            double x = positive && j > i ? value(j, i) : value(i, j);
            a[(size_t)c * local_rows + r] = positive && i == j ? x + n : x;
        }
}

static double norm(const double *a, double *work) { return pdlange_("F", &n, &n, a, &one, &one, desc, work); }

static double *fresh(void) {
    double *a = malloc(count * sizeof(double));
    if (!a) { fprintf(stderr, "no memory for %zu values\n", count); MPI_Abort(MPI_COMM_WORLD, 2); }
    memset(a, 0, count * sizeof(double)); /* its pages are there before the clock starts */
    return a;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (argc < 7) { fprintf(stderr, "scalapack ROWS COLUMNS BLOCK N REPEATS OPERATION...\n"); MPI_Abort(MPI_COMM_WORLD, 2); }
    grid_rows = atoi(argv[1]); grid_columns = atoi(argv[2]); block = atoi(argv[3]); n = atoi(argv[4]);
    int repeats = atoi(argv[5]), info;
    Cblacs_get(-1, 0, &context);
    Cblacs_gridinit(&context, "Row", grid_rows, grid_columns);
    Cblacs_gridinfo(context, &grid_rows, &grid_columns, &grid_row, &grid_column);
    local_rows = numroc_(&n, &block, &grid_row, &zero, &grid_rows);
    local_columns = numroc_(&n, &block, &grid_column, &zero, &grid_columns);
    int lead = local_rows > 1 ? local_rows : 1;
    descinit_(desc, &n, &n, &block, &block, &zero, &zero, &context, &lead, &info);
    count = (size_t)lead * (local_columns > 1 ? local_columns : 1);
    double *a = fresh(), *b = fresh(), *c = fresh(), *norms = calloc(4 * (size_t)n + 16, sizeof(double));
    for (int which = 6; which < argc; which++)
        for (int repeat = 0; repeat < repeats; repeat++) {
            const char *operation = argv[which];
            double residual = -1, size, began, seconds, cpu, cpu_of_all, wanted, *work = NULL, *tau = NULL, *values = NULL;
            int length = -1;
            fill(a, !strcmp(operation, "cholesky"));
            fill(b, 0);
            size = norm(a, norms);
            if (!strcmp(operation, "qr")) {
                tau = malloc(((size_t)local_columns + 1) * sizeof(double));
                pdgeqrf_(&n, &n, a, &one, &one, desc, tau, &wanted, &length, &info);
                int first = (int)wanted;
                pdorgqr_(&n, &n, &n, a, &one, &one, desc, tau, &wanted, &length, &info);
                length = first > (int)wanted ? first : (int)wanted;
                work = calloc(length, sizeof(double));
            } else if (!strcmp(operation, "svd")) {
                values = malloc((size_t)n * sizeof(double));
                pdgesvd_("V", "V", &n, &n, a, &one, &one, desc, values, b, &one, &one, desc, c, &one, &one, desc, &wanted, &length, &info);
                length = (int)wanted + 4 * n + 64; /* the answer of 2.2.1 is too small for some grids */
                work = calloc(length, sizeof(double));
            }
            MPI_Barrier(MPI_COMM_WORLD);
            began = MPI_Wtime();
            cpu = (double)clock() / CLOCKS_PER_SEC;
            if (!strcmp(operation, "gemm"))
                pdgemm_("N", "N", &n, &n, &n, &done, a, &one, &one, desc, b, &one, &one, desc, &dzero, c, &one, &one, desc), info = 0;
            else if (!strcmp(operation, "cholesky"))
                pdpotrf_("L", &n, a, &one, &one, desc, &info);
            else if (!strcmp(operation, "qr")) {
                pdgeqrf_(&n, &n, a, &one, &one, desc, tau, work, &length, &info);
                memcpy(c, a, count * sizeof(double)); /* R */
                pdorgqr_(&n, &n, &n, a, &one, &one, desc, tau, work, &length, &info);
            } else if (!strcmp(operation, "svd"))
                pdgesvd_("V", "V", &n, &n, a, &one, &one, desc, values, b, &one, &one, desc, c, &one, &one, desc, work, &length, &info);
            else { fprintf(stderr, "no operation %s\n", operation); MPI_Abort(MPI_COMM_WORLD, 2); }
            MPI_Barrier(MPI_COMM_WORLD);
            seconds = MPI_Wtime() - began;
            cpu = (double)clock() / CLOCKS_PER_SEC - cpu;
            MPI_Reduce(&cpu, &cpu_of_all, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
            if (info) { fprintf(stderr, "%s failed: info = %d\n", operation, info); MPI_Abort(MPI_COMM_WORLD, 3); }
            if (!strcmp(operation, "cholesky") || !strcmp(operation, "qr")) { /* residual of A - L L^T, or of A - Q R */
                int low = !strcmp(operation, "cholesky");
                double *x = low ? a : c;
                for (int k = 0; k < local_columns; k++)
                    for (int r = 0; r < local_rows; r++) {
                        int i = global(r, grid_row, grid_rows), j = global(k, grid_column, grid_columns);
                        if (low ? j > i : j < i) x[(size_t)k * local_rows + r] = 0;
                    }
                fill(b, low);
                pdgemm_("N", low ? "T" : "N", &n, &n, &n, &minus, a, &one, &one, desc, x, &one, &one, desc, &done, b, &one, &one, desc);
                residual = norm(b, norms) / (size * n * 2.22e-16);
            } else if (!strcmp(operation, "svd")) {
                double sum = 0;
                for (int i = 0; i < n; i++) sum += values[i] * values[i];
                residual = fabs(sqrt(sum) - size) / (size * n * 2.22e-16);
            }
            if (!rank) { printf("{\"operation\": \"%s\", \"n\": %d, \"seconds\": %.6f, \"cpu_seconds\": %.6f, \"residual\": %.4f}\n", operation, n, seconds, cpu_of_all, residual); fflush(stdout); }
            free(work); free(tau); free(values);
        }
    free(a); free(b); free(c); free(norms);
    Cblacs_gridexit(context);
    MPI_Finalize();
    return 0;
}
