/* Fingerprints of the samples of a batch, and the two tables in which those of training and of evaluation meet (readings/overlap.py).
 *
 * A table is a row of entries; a fingerprint has one place in it, and the newest that comes there stays. Two samples are the same if all 64 bits are.
 * Only the stable ABI of Python 3.11 is used. Tables are checked for their size; the rows of a batch are the caller's to keep alive.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

struct entry {
    uint64_t fingerprint;
    uint32_t step;
    uint16_t round;
    uint8_t num_rounds, mark;
};

/* Of a mark: by which loader a sample of the evaluation came, whether it is trained on by intent, and whether it was met among the trained ones. */
enum { LOADER = 63, MEANT = 64, MET = 128 };
/* LOADER itself stands for calls that no loader fed: there a sample must be evaluated twice, and not so few steps from being trained on. */
enum { MIN_ROUNDS = 2, CLOSE = 3 };

/* Of a longer row so many bytes are read, in runs that are spread over the whole. */
enum { MOST_BYTES = 1024, RUN_BYTES = 64 };
/* A row that is read in parts must change so often in them: the rest of a sparse one may differ. */
enum { MIN_CHANGES = 8 };

static uint64_t mixed(uint64_t x)
{
    x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93u;
    x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93u;
    return x ^ (x >> 32);
}

struct reading {
    uint64_t lanes[4], previous;
    size_t num_words, num_changes;
};

static void take(struct reading *seen, const unsigned char *from, size_t num_bytes)
{
    for (size_t at = 0; at < num_bytes; at += 8) {
        uint64_t word = 0;
        memcpy(&word, from + at, num_bytes - at < 8 ? num_bytes - at : 8);
        seen->num_changes += seen->num_words > 0 && word != seen->previous;
        seen->previous = word;
        uint64_t *lane = &seen->lanes[seen->num_words++ & 3];
        *lane = (*lane ^ word) * 0x9E3779B97F4A7C15u;
        *lane ^= *lane >> 29;
    }
}

/* Padding: the run of equal elements at either end, if there are two or more. */
static void trim(const unsigned char **row, size_t *num_bytes, size_t size)
{
    size_t count = *num_bytes / size, tail = 1, head = 1;
    const unsigned char *at = *row;
    while (tail < count && !memcmp(at + (count - 1 - tail) * size, at + (count - 1) * size, size))
        tail++;
    if (tail > 1)
        count -= tail;
    while (head < count && !memcmp(at + head * size, at, size))
        head++;
    if (head > 1 && head < count) {
        *row += head * size;
        count -= head;
    }
    *num_bytes = count * size;
}

/* 0: it says nothing, as an empty or a constant row does. */
static uint64_t fingerprint(const unsigned char *row, size_t num_bytes, size_t size, int is_trimmed)
{
    struct reading seen = {{1, 2, 3, 4}, 0, 0, 0};
    if (is_trimmed)
        trim(&row, &num_bytes, size);
    if (num_bytes <= MOST_BYTES)
        take(&seen, row, num_bytes);
    else
        for (size_t run = 0, runs = MOST_BYTES / RUN_BYTES; run < runs; run++)
            take(&seen, row + run * ((num_bytes - RUN_BYTES) / (runs - 1)), RUN_BYTES);
    if (seen.num_changes < (num_bytes <= MOST_BYTES ? 1 : MIN_CHANGES))
        return 0;
    uint64_t all = mixed(num_bytes);
    for (int lane = 0; lane < 4; lane++)
        all = mixed(all ^ seen.lanes[lane]);
    return all ? all : 1;
}

static PyObject *sign(PyObject *self, PyObject *args)
{
    Py_ssize_t address, rows, stride, num_bytes, size, first, step;
    int is_trimmed;
    (void)self;
    if (!PyArg_ParseTuple(args, "nnnnnpnn", &address, &rows, &stride, &num_bytes, &size, &is_trimmed, &first, &step))
        return NULL;
    if (!address || rows < 0 || num_bytes <= 0 || size <= 0 || step <= 0 || first < 0) {
        PyErr_SetString(PyExc_ValueError, "no rows");
        return NULL;
    }
    Py_ssize_t count = first < rows ? (rows - first - 1) / step + 1 : 0;
    PyObject *out = PyBytes_FromStringAndSize(NULL, count * 8);
    if (!out)
        return NULL;
    char *to = PyBytes_AsString(out);
    for (Py_ssize_t row = first; row < rows; row += step, to += 8) {
        uint64_t found = fingerprint((const unsigned char *)address + row * stride, (size_t)num_bytes, (size_t)size, is_trimmed);
        memcpy(to, &found, 8);
    }
    return out;
}

static struct entry *place(Py_buffer *table, uint64_t fingerprint)
{
    size_t size = (size_t)table->len / sizeof(struct entry);
    return (struct entry *)table->buf + (fingerprint & (size - 1));
}

static int meets(struct entry *evaluated, const struct entry *trained, uint64_t training)
{
    uint32_t late = evaluated->step > trained->step ? evaluated->step - trained->step : trained->step - evaluated->step;
    int loader = evaluated->mark & LOADER;
    if (loader == LOADER && late < CLOSE)
        evaluated->mark |= MEANT;
    int is_meant = loader == LOADER ? evaluated->num_rounds < MIN_ROUNDS : (int)(training >> loader & 1);
    return !(evaluated->mark & (MET | MEANT)) && !is_meant;
}

/* What came of one fingerprint; the loader of a sample that was met is written down. */
struct visit {
    Py_ssize_t known, fresh, repeated, met;
    unsigned char loaders[64];
};

struct moment {
    int is_meant;
    uint32_t step;
    unsigned short round;
    unsigned char loader;
    uint64_t training;
    int is_evaluation;
};

static void enter(struct visit *num, Py_buffer *own, Py_buffer *other, uint64_t fingerprint, const struct moment *now)
{
    struct entry *mine = place(own, fingerprint), *theirs = place(other, fingerprint);
    num->known++;
    if (mine->fingerprint != fingerprint) {
        *mine = (struct entry){fingerprint, now->step, now->round, 1, now->loader & LOADER};
        num->fresh++;
    } else if (mine->round == now->round) {
        num->repeated++;
    } else {
        mine->round = now->round;
        mine->num_rounds += mine->num_rounds < UINT8_MAX;
    }
    mine->step = now->step;
    mine->mark |= now->is_meant ? MEANT : 0;
    struct entry *evaluated = now->is_evaluation ? mine : theirs, *trained = now->is_evaluation ? theirs : mine;
    if (theirs->fingerprint == fingerprint && num->met < 64 && meets(evaluated, trained, now->training)) {
        num->loaders[num->met++] = evaluated->mark & LOADER;
        evaluated->mark |= MET;
    }
}

/* Whether a call is of a batch that was just trained on: of a batch only some rows are known, so that a quarter of them is enough. */
static int is_own_batch(const Py_buffer *prints, Py_buffer *trained, uint32_t step)
{
    Py_ssize_t known = 0, close = 0;
    for (Py_ssize_t at = 0; at + 8 <= prints->len; at += 8) {
        uint64_t fingerprint;
        memcpy(&fingerprint, (char *)prints->buf + at, 8);
        const struct entry *one = place(trained, fingerprint);
        known += fingerprint != 0;
        close += fingerprint && one->fingerprint == fingerprint && step - one->step < CLOSE;
    }
    return close && close * 4 >= known;
}

static PyObject *visit(PyObject *self, PyObject *args)
{
    Py_buffer prints, own, other;
    unsigned int step, round, loader;
    unsigned long long training;
    struct moment now;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*w*w*pIIIK", &prints, &own, &other, &now.is_evaluation, &step, &round, &loader, &training))
        return NULL;
    now.step = step, now.round = (unsigned short)round, now.loader = (unsigned char)loader, now.training = training;
    struct visit num = {0};
    int is_fit = own.len == other.len && own.len >= (Py_ssize_t)sizeof(struct entry) && !(own.len & (own.len - 1));
    now.is_meant = is_fit && now.is_evaluation && now.loader == LOADER && is_own_batch(&prints, &other, step);
    for (Py_ssize_t at = 0; is_fit && at + 8 <= prints.len; at += 8) {
        uint64_t fingerprint;
        memcpy(&fingerprint, (char *)prints.buf + at, 8);
        if (fingerprint)
            enter(&num, &own, &other, fingerprint, &now);
    }
    PyBuffer_Release(&prints);
    PyBuffer_Release(&own);
    PyBuffer_Release(&other);
    return Py_BuildValue("nnny#", num.known, num.fresh, num.repeated, (char *)num.loaders, num.met);
}

static PyObject *count(PyObject *self, PyObject *args)
{
    Py_ssize_t address, rows, size;
    Py_buffer counts;
    (void)self;
    if (!PyArg_ParseTuple(args, "nnnw*", &address, &rows, &size, &counts))
        return NULL;
    int64_t *to = counts.buf;
    Py_ssize_t classes = counts.len / 8, left_out = 0;
    for (Py_ssize_t row = 0; address && row < rows; row++) {
        const char *at = (const char *)address + row * size;
        int64_t value = size == 8 ? *(const int64_t *)at : size == 4 ? *(const int32_t *)at : size == 2 ? *(const int16_t *)at : *(const uint8_t *)at;
        if (value >= 0 && value < classes)
            to[value]++;
        else
            left_out += value >= classes;
    }
    PyBuffer_Release(&counts);
    return PyLong_FromSsize_t(left_out);
}

/* In the order of batches._SURVEYED. */
enum { FLOAT32, FLOAT64, INT64, INT32 };

static double value_at(const void *memory, Py_ssize_t place, int kind)
{
    switch (kind) {
    case FLOAT32:
        return ((const float *)memory)[place];
    case FLOAT64:
        return ((const double *)memory)[place];
    case INT64:
        return (double)((const int64_t *)memory)[place];
    default:
        return ((const int32_t *)memory)[place];
    }
}

static PyObject *survey(PyObject *self, PyObject *args)
{
    Py_ssize_t address, count;
    int kind;
    (void)self;
    if (!PyArg_ParseTuple(args, "nni", &address, &count, &kind))
        return NULL;
    if (!address || count <= 0 || kind < FLOAT32 || kind > INT32) {
        PyErr_SetString(PyExc_ValueError, "no elements");
        return NULL;
    }
    const void *memory = (const void *)address;
    double low = INFINITY, high = -INFINITY, sum = 0, squares = 0;
    for (Py_ssize_t place = 0; place < count; place++) {
        double value = value_at(memory, place, kind);
        if (!isfinite(value))
            Py_RETURN_NONE;
        low = value < low ? value : low;
        high = value > high ? value : high;
        sum += value;
    }
    double mean = sum / (double)count;
    for (Py_ssize_t place = 0; place < count; place++) {
        double away = value_at(memory, place, kind) - mean;
        squares += away * away;
    }
    return Py_BuildValue("dddd", low, high, mean, sqrt(squares / (double)count));
}

/* Memory that seldom changes: nothing is made for it while it does not. */
static PyObject *kept(PyObject *self, PyObject *args)
{
    Py_ssize_t address, num_bytes;
    PyObject *last;
    (void)self;
    if (!PyArg_ParseTuple(args, "nnS", &address, &num_bytes, &last))
        return NULL;
    if (!address || num_bytes < 0) {
        PyErr_SetString(PyExc_ValueError, "no memory");
        return NULL;
    }
    if (PyBytes_Size(last) == num_bytes && !memcmp(PyBytes_AsString(last), (const void *)address, (size_t)num_bytes)) {
        Py_INCREF(last);
        return last;
    }
    return PyBytes_FromStringAndSize((const char *)address, num_bytes);
}

static PyMethodDef methods[] = {
    {"kept", kept, METH_VARARGS, "kept(address, num_bytes, last): the bytes there, the very object `last` if they are the same."},
    {"survey", survey, METH_VARARGS, "Least, largest, mean and standard deviation; None: something is not finite."},
    {"sign", sign, METH_VARARGS, "Fingerprints of rows."},
    {"visit", visit, METH_VARARGS, "Put fingerprints into a table and look them up in another."},
    {"count", count, METH_VARARGS, "How often each small whole number occurs; returns how many are too large."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_samples", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__samples(void)
{
    return PyModule_Create(&module);
}
