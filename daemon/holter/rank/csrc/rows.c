/* What is told of a reading, in one call: `marks` of census.py and `FingerprintRows` of comparison.py, which define what a comparison tells, and `outline` of fused_pass.py.
 *
 * Rows are those of holter_kernels (layout.ROW). Only the stable ABI of Python 3.11 is used. Buffers are checked for size, places for their range.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <math.h>

#include "pass.h"
#include "tree.h"

/* records.Mark */
enum { CONSTANT = 1, ZERO = 2, NONFINITE = 4, ROUNDED = 8, HUGE_VALUES = 16 };
/* DtypeTraits.flags */
enum { WIDE = 1, FLOAT = 2, NORMAL = 4 };

struct thresholds {
    double huge, nearly_all, many_subnormals, min_rounded;
};

static uint8_t marks_of(const struct row *row, uint8_t traits, const struct thresholds *at)
{
    double numel = (double)row->numel, zeros = (double)row->zeros, nonzeros = numel - zeros;
    int is_bad = row->nans + row->pos_infs + row->neg_infs > 0;
    int is_constant = row->numel > 1 && row->min == row->max && !is_bad;
    int is_short = (double)row->low_zero - zeros >= at->nearly_all * nonzeros && nonzeros >= at->min_rounded;
    int is_huge = ((traits & FLOAT) && row->absmax > at->huge) ||
                  ((traits & NORMAL) && (double)row->subnormals > at->many_subnormals * numel);
    return (uint8_t)((is_constant ? CONSTANT : 0) | (row->numel > 0 && nonzeros == 0 ? ZERO : 0) | (is_bad ? NONFINITE : 0) |
                     ((traits & WIDE) && !is_constant && is_short ? ROUNDED : 0) | (is_huge ? HUGE_VALUES : 0));
}

struct packed {
    uint64_t *fingerprints;
    float *norms;
    double *sums;
    uint8_t *marks;
    double sum, square_sum;
};

static void fill(struct packed *out, const struct row *rows, const int64_t *places, const uint8_t *traits, size_t count,
                 const struct thresholds *at)
{
    for (size_t k = 0; k < count; k++) {
        const struct row *row = &rows[k];
        size_t place = (size_t)places[k];
        out->fingerprints[place] = row->fingerprint;
        out->norms[place] = (float)sqrt(row->square_sum);
        out->sums[place] = row->sum;
        out->marks[place] = marks_of(row, traits[k], at);
        out->sum += row->sum;
        out->square_sum += row->square_sum;
    }
}

static int root_over(const uint64_t *fingerprints, const int64_t *chosen, size_t count, uint64_t *root)
{
    uint64_t *nodes = PyMem_Malloc((count + 1) * sizeof *nodes);
    if (!nodes)
        return -1;
    for (size_t k = 0; k < count; k++)
        nodes[k] = fingerprints[chosen[k]];
    *root = tree_root(nodes, count, 32);
    PyMem_Free(nodes);
    return 0;
}

static int are_places(const Py_buffer *places, Py_ssize_t size)
{
    const int64_t *place = places->buf;
    for (Py_ssize_t k = 0; k < places->len / 8; k++)
        if (place[k] < 0 || place[k] >= size)
            return 0;
    return 1;
}

/* A new bytes object of zeros, and where its bytes are. */
static PyObject *zeros(Py_ssize_t size, void *where)
{
    PyObject *made = PyBytes_FromStringAndSize(NULL, size);
    if (made) {
        *(char **)where = PyBytes_AsString(made);
        memset(PyBytes_AsString(made), 0, (size_t)size);
    }
    return made;
}

static PyObject *pack(PyObject *module, PyObject *args)
{
    Py_buffer rows = {0}, places = {0}, traits = {0}, chosen = {0};
    Py_ssize_t size;
    struct thresholds at;
    struct packed out = {0};
    PyObject *made[4] = {0}, *result = NULL;
    uint64_t root;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*y*n(dddd):pack", &rows, &places, &traits, &chosen, &size, &at.huge, &at.nearly_all,
                          &at.many_subnormals, &at.min_rounded))
        return NULL;
    Py_ssize_t count = rows.len / (Py_ssize_t)sizeof(struct row);
    if (size < 0 || rows.len % (Py_ssize_t)sizeof(struct row) || places.len != count * 8 || traits.len != count || chosen.len % 8 ||
        !are_places(&places, size) || !are_places(&chosen, size)) {
        PyErr_SetString(PyExc_ValueError, "rows, places and traits do not belong together");
        goto release;
    }
    made[0] = zeros(size * 8, &out.fingerprints);
    made[1] = zeros(size * 4, &out.norms);
    made[2] = zeros(size * 8, &out.sums);
    made[3] = zeros(size, &out.marks);
    if (!made[0] || !made[1] || !made[2] || !made[3])
        goto release;
    fill(&out, rows.buf, places.buf, traits.buf, (size_t)count, &at);
    if (root_over(out.fingerprints, chosen.buf, (size_t)chosen.len / 8, &root)) {
        PyErr_NoMemory();
        goto release;
    }
    result = Py_BuildValue("KOOOOdd", root, made[0], made[1], made[2], made[3], out.sum, out.square_sum);
release:
    for (int k = 0; k < 4; k++)
        Py_XDECREF(made[k]);
    PyBuffer_Release(&rows);
    PyBuffer_Release(&places);
    PyBuffer_Release(&traits);
    PyBuffer_Release(&chosen);
    return result;
}

/* What every step asks of its gradients, in one pass over the rows. */
static PyObject *outline(PyObject *module, PyObject *args)
{
    Py_buffer buffer;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*:outline", &buffer))
        return NULL;
    int fits = buffer.len % (Py_ssize_t)sizeof(struct row) == 0, is_bad = 0, has_zero = 0;
    double square_sum = 0;
    const struct row *rows = buffer.buf;
    for (size_t k = 0; fits && k < (size_t)buffer.len / sizeof *rows; k++) {
        is_bad |= (rows[k].nans | rows[k].pos_infs | rows[k].neg_infs) != 0;
        has_zero |= rows[k].numel > 0 && rows[k].zeros == rows[k].numel;
        square_sum += rows[k].square_sum;
    }
    PyBuffer_Release(&buffer);
    if (!fits)
        return PyErr_Format(PyExc_ValueError, "these are no rows");
    return Py_BuildValue("NNd", PyBool_FromLong(is_bad), PyBool_FromLong(has_zero), square_sum);
}

static PyMethodDef methods[] = {
    {"outline", outline, METH_VARARGS, "outline(rows): whether one is not finite, whether one is all zero, the sum of all square sums."},
    {"pack", pack, METH_VARARGS,
     "pack(rows, places, traits, chosen, size, thresholds): root, fingerprints, norms, sums and marks of all entries, sum, square sum."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_rows", "What is told of a reading.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__rows(void) { return PyModule_Create(&definition); }
