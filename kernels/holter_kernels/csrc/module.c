/* Python's view: `run` over the buffers of a plan, `fingerprint` of memory, `root`, and which instruction set is in use.
 *
 * Only the stable ABI of Python 3.11 is used. Buffers are checked for size; addresses are the caller's word.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "look.h"
#include "pass.h"

static const struct isa *const all_isas[] = {
#if defined(__x86_64__)
    &isa_avx512,
    &isa_avx2,
#endif
    &isa_generic,
};
enum { NUM_ISAS = sizeof all_isas / sizeof *all_isas };

static int get_buffer(PyObject *object, Py_buffer *view, size_t item, int flags)
{
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | flags))
        return -1;
    if ((size_t)view->len % item == 0)
        return 0;
    PyBuffer_Release(view);
    PyErr_Format(PyExc_ValueError, "a buffer of %zd bytes does not hold items of %zu", view->len, item);
    return -1;
}

static PyObject *py_run(PyObject *self, PyObject *args)
{
    PyObject *objects[7];
    Py_buffer views[7] = {{0}};
    static const size_t items[7] = {sizeof(struct chunk), sizeof(struct row), sizeof(uint64_t), sizeof(uint64_t),
                                    sizeof(struct row),   sizeof(uint64_t),   sizeof(uint64_t)};
    struct plan plan;
    int got = 0, mode = 0;
    (void)self;
    memset(&plan, 0, sizeof plan);
    if (!PyArg_ParseTuple(args, "OOOOOOOii", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4], &objects[5],
                          &objects[6], &mode, &plan.num_threads))
        return NULL;
    int num_buffers = objects[6] == Py_None ? 6 : 7;
    for (; got < num_buffers; got++)
        if (get_buffer(objects[got], &views[got], items[got], got == 1 || got == 4 || got == 6 ? PyBUF_WRITABLE : 0))
            goto release;
    plan.mode = (unsigned)mode | (num_buffers == 7 ? HISTOGRAM : 0);
    plan.chunks = views[0].buf;
    plan.partials = views[1].buf;
    plan.first_chunk = views[2].buf;
    plan.jobs = views[3].buf;
    plan.rows = views[4].buf;
    plan.bases = views[5].buf;
    plan.bins = num_buffers == 7 ? views[6].buf : NULL;
    plan.num_chunks = (size_t)views[0].len / items[0];
    plan.num_rows = (size_t)views[4].len / items[4];
    plan.num_jobs = (size_t)views[3].len / items[3];
    if (plan.num_jobs == 0 || (size_t)views[1].len / items[1] != plan.num_chunks ||
        (size_t)views[2].len / items[2] != plan.num_rows + 1 || plan.jobs[--plan.num_jobs] != plan.num_chunks ||
        plan.first_chunk[plan.num_rows] != plan.num_chunks ||
        (size_t)views[5].len / items[5] != plan.num_rows ||
        (plan.bins && (size_t)views[6].len / items[6] != plan.num_rows * NUM_BINS)) {
        PyErr_SetString(PyExc_ValueError, "the buffers of the plan do not belong together");
        goto release;
    }
    Py_BEGIN_ALLOW_THREADS
    run(&plan);
    Py_END_ALLOW_THREADS
release:
    while (got--)
        PyBuffer_Release(&views[got]);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_fingerprint(PyObject *self, PyObject *args)
{
    unsigned long long address, count, offset, total = 0;
    unsigned code, width;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKII", &address, &count, &offset, &code, &width))
        return NULL;
    if (code >= NUM_CODES)
        return PyErr_Format(PyExc_ValueError, "no dtype has code %u", code);
    Py_BEGIN_ALLOW_THREADS
    while (count) { /* a chunk lies in one group */
        uint64_t room = 65536 - offset % 65536, n = count < room ? count : room;
        struct chunk chunk = {address, n, offset, 0, code};
        total += fingerprint(&chunk);
        address += n * width;
        offset += n;
        count -= n;
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(total);
}

static PyObject *py_set_keys(PyObject *self, PyObject *args)
{
    Py_buffer views[3] = {{0}};
    void *const targets[3] = {keys.places, keys.rows, keys.dtypes};
    static const size_t sizes[3] = {sizeof(uint32_t) * BLOCK, sizeof keys.rows, sizeof keys.dtypes};
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*y*", &views[0], &views[1], &views[2]))
        return NULL;
    for (int k = 0; k < 3; k++)
        if ((size_t)views[k].len != sizes[k])
            PyErr_Format(PyExc_ValueError, "key table %d has %zd bytes instead of %zu", k, views[k].len, sizes[k]);
        else
            memcpy(targets[k], views[k].buf, sizes[k]);
    for (int k = 0; k < 3; k++)
        PyBuffer_Release(&views[k]);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_available(PyObject *self, PyObject *unused)
{
    PyObject *names = PyList_New(0);
    (void)self, (void)unused;
    for (int k = 0; names && k < NUM_ISAS; k++) {
        if (!all_isas[k]->is_supported())
            continue;
        PyObject *name = PyUnicode_FromString(all_isas[k]->name);
        if (!name || PyList_Append(names, name))
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *py_select(PyObject *self, PyObject *args)
{
    const char *name;
    (void)self;
    if (!PyArg_ParseTuple(args, "s", &name))
        return NULL;
    for (int k = 0; k < NUM_ISAS; k++)
        if (!strcmp(all_isas[k]->name, name) && all_isas[k]->is_supported()) {
            active_isa = all_isas[k];
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "this processor has no instruction set %s", name);
}

static PyObject *py_selected(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return PyUnicode_FromString(active_isa->name);
}

static PyMethodDef methods[] = {
    {"run", py_run, METH_VARARGS, "run(chunks, partials, first_chunk, jobs, rows, bases, bins or None, mode, num_threads)"},
    {"look", py_look, METH_VARARGS, "look(dlpack functions, tensors, types, layouts, addresses)"},
    {"see", py_see, METH_VARARGS, "see(tensors, types, of their gradients)"},
    {"kinds", py_kinds, METH_VARARGS, "kinds(tensors, types): a byte each, of its dtype and whether it requires a gradient"},
    {"bind", py_bind, METH_VARARGS, "bind(functions, tensor, implementation, bytes of an object)"},
    {"fingerprint", py_fingerprint, METH_VARARGS, "fingerprint(address, count, offset, code, width)"},
    {"set_keys", py_set_keys, METH_VARARGS, "set_keys(places, rows, dtypes)"},
    {"available", py_available, METH_NOARGS, "Instruction sets this processor has, best first."},
    {"select", py_select, METH_VARARGS, "Use an instruction set by name."},
    {"selected", py_selected, METH_NOARGS, "The instruction set in use."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "The native pass; see pass.h.", -1, methods, 0, 0, 0, 0};

PyMODINIT_FUNC PyInit__native(void)
{
    for (int k = NUM_ISAS - 1; k >= 0; k--)
        if (all_isas[k]->is_supported())
            active_isa = all_isas[k];
    return PyModule_Create(&module);
}
