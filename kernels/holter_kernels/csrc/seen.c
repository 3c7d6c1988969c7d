/* Where dense tensors in host memory lie and how often each was written to: of a whole list in one call, without an object of Python for each gradient.
 *
 * torch's own functions are called, by the addresses that `seen.py` has found and tried (`bind`). None of them raises for what reaches it here: an undefined,
 * sparse or inference tensor is turned away before. A tensor is one word, the pointer to its implementation, wherever it stands.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "look.h"

typedef const void *tensor_word;
typedef int32_t (*ask_int32)(const tensor_word *, int32_t *);
typedef int32_t (*ask_int64)(const tensor_word *, int64_t *);
typedef int32_t (*ask_bool)(const tensor_word *, bool *);
typedef int32_t (*ask_pointer)(const tensor_word *, void **);

/* In the order of `seen.SYMBOLS`. */
static struct {
    const tensor_word *(*gradient)(const void *implementation);
    bool (*is_trained)(const void *implementation);
    int64_t (*version)(const tensor_word *);
    bool (*is_inference)(const tensor_word *), (*is_negated)(const tensor_word *);
    ask_int32 layout, dtype, device_type;
    ask_int64 numel, storage_offset, storage_bytes;
    ask_bool is_contiguous;
    ask_pointer data;
} torch;
enum { NUM_SYMBOLS = sizeof torch / sizeof(void *), MAX_TYPES = 4, HOST = 1 };

static Py_ssize_t word_at; /* of an object of Python: where its tensor stands; 0 while nothing is bound */
static const void *undefined;

struct layout {
    uint64_t numel, kind;
};

/* DLPack's code, bits and device of a dtype by torch's number of it; 0: not looked at here. */
static uint64_t kind_of(int32_t dtype, uint64_t *num_bytes)
{
    enum { HALF = 5, FLOAT = 6, DOUBLE = 7, BFLOAT16 = 15 };
    uint64_t code = dtype == BFLOAT16 ? 4 : 2;
    *num_bytes = dtype == HALF || dtype == BFLOAT16 ? 2 : dtype == FLOAT ? 4 : dtype == DOUBLE ? 8 : 0;
    return *num_bytes ? code | (*num_bytes * 8) << 8 | 1 << 16 | HOST << 24 : 0;
}

static int see(const tensor_word *tensor, uint64_t *address, uint64_t *version, struct layout *layout)
{
    int32_t form, dtype, device;
    int64_t numel, offset, storage_bytes;
    uint64_t num_bytes;
    bool is_contiguous;
    void *data;
    if (*tensor == undefined || torch.is_inference(tensor) || torch.layout(tensor, &form) || form || torch.device_type(tensor, &device) ||
        device || torch.dtype(tensor, &dtype) || !(layout->kind = kind_of(dtype, &num_bytes)) || torch.numel(tensor, &numel) || numel <= 0 ||
        torch.is_contiguous(tensor, &is_contiguous) || !is_contiguous || torch.is_negated(tensor) ||
        torch.storage_offset(tensor, &offset) || torch.storage_bytes(tensor, &storage_bytes) ||
        (uint64_t)(offset + numel) * num_bytes > (uint64_t)storage_bytes || torch.data(tensor, &data) || !data)
        return -1;
    *address = (uint64_t)(uintptr_t)data;
    *version = (uint64_t)torch.version(tensor);
    layout->numel = (uint64_t)numel;
    return 0;
}

static int is_one_of(PyObject *object, PyObject *types)
{
    for (Py_ssize_t k = 0; k < PyTuple_Size(types); k++)
        if ((PyObject *)Py_TYPE(object) == PyTuple_GetItem(types, k))
            return 1;
    return 0;
}

/* What the step has pushed out of the caches is fetched for all of them at once, instead of one after another. */
static void fetch(const void *implementation)
{
    for (size_t at = 0; at < 192; at += 64)
        __builtin_prefetch((const char *)implementation + at);
}

/* The implementation of each tensor of a list; -1: one is of another type, or none. */
static int find_all(PyObject *tensors, PyObject *types, tensor_word *words)
{
    for (Py_ssize_t k = 0; k < PyList_Size(tensors); k++) {
        PyObject *object = PyList_GetItem(tensors, k);
        if (!is_one_of(object, types))
            return -1;
        words[k] = *(const tensor_word *)((const char *)object + word_at);
        if (!words[k] || words[k] == undefined)
            return -1;
        fetch(words[k]);
    }
    return 0;
}

static int see_all(tensor_word *words, Py_ssize_t count, int is_of_gradients, uint64_t *addresses, uint64_t *versions, struct layout *layouts)
{
    for (Py_ssize_t k = 0; is_of_gradients && k < count; k++)
        fetch(words[k] = *torch.gradient(words[k]));
    for (Py_ssize_t k = 0; k < count; k++)
        if (see(&words[k], &addresses[k], &versions[k], &layouts[k]))
            return -1;
    return 0;
}

PyObject *py_see(PyObject *self, PyObject *args)
{
    PyObject *tensors, *types, *out[3] = {NULL}, *result = NULL;
    tensor_word *words = NULL;
    int is_of_gradients;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O!p", &PyList_Type, &tensors, &PyTuple_Type, &types, &is_of_gradients))
        return NULL;
    if (!word_at)
        Py_RETURN_NONE;
    Py_ssize_t count = PyList_Size(tensors);
    static const size_t sizes[3] = {sizeof(uint64_t), sizeof(uint64_t), sizeof(struct layout)};
    void *to[3] = {NULL};
    for (int k = 0; k < 3; k++)
        if (!(out[k] = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizes[k])) || !(to[k] = PyBytes_AsString(out[k])))
            goto release;
    if (!(words = PyMem_Malloc((size_t)(count + 1) * sizeof *words))) {
        PyErr_NoMemory();
        goto release;
    }
    if (find_all(tensors, types, words) || see_all(words, count, is_of_gradients, to[0], to[1], to[2])) {
        result = Py_None;
        Py_INCREF(result);
    } else {
        result = PyTuple_Pack(3, out[0], out[1], out[2]);
    }
release:
    PyMem_Free(words);
    for (int k = 0; k < 3; k++)
        Py_XDECREF(out[k]);
    return result;
}

/* A byte for each tensor: torch's number of its dtype, and whether it requires a gradient. */
PyObject *py_kinds(PyObject *self, PyObject *args)
{
    PyObject *tensors, *types, *kinds = NULL;
    int is_plain = 1;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &tensors, &PyTuple_Type, &types))
        return NULL;
    if (!word_at)
        Py_RETURN_NONE;
    Py_ssize_t count = PyList_Size(tensors);
    tensor_word *words = PyMem_Malloc((size_t)(count + 1) * sizeof *words);
    if (!words)
        return PyErr_NoMemory();
    if (!(kinds = PyBytes_FromStringAndSize(NULL, count)))
        goto release;
    char *to = PyBytes_AsString(kinds);
    is_plain = !find_all(tensors, types, words);
    for (Py_ssize_t k = 0; is_plain && k < count; k++) {
        int32_t dtype = 0;
        is_plain = !torch.dtype(&words[k], &dtype);
        to[k] = (char)(dtype << 1 | torch.is_trained(words[k]));
    }
release:
    PyMem_Free(words);
    if (!kinds || is_plain)
        return kinds;
    Py_DECREF(kinds);
    Py_RETURN_NONE;
}

/* bind(addresses of functions, a tensor without gradient, where its implementation is, bytes of an object of its type); no addresses: nothing is seen from now on. */
PyObject *py_bind(PyObject *self, PyObject *args)
{
    PyObject *addresses, *object;
    unsigned long long implementation;
    Py_ssize_t num_bytes;
    void *found[NUM_SYMBOLS];
    (void)self;
    word_at = 0;
    if (!PyArg_ParseTuple(args, "O!OKn", &PyTuple_Type, &addresses, &object, &implementation, &num_bytes))
        return NULL;
    if (PyTuple_Size(addresses) != NUM_SYMBOLS)
        Py_RETURN_FALSE;
    for (Py_ssize_t k = 0; k < NUM_SYMBOLS; k++)
        if (!(found[k] = PyLong_AsVoidPtr(PyTuple_GetItem(addresses, k))))
            return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "function %zd has no address", k);
    memcpy(&torch, found, sizeof torch);
    Py_ssize_t at = 0;
    for (Py_ssize_t k = (Py_ssize_t)sizeof(PyObject); k + (Py_ssize_t)sizeof(void *) <= num_bytes; k += (Py_ssize_t)sizeof(void *))
        if (!memcmp((const char *)object + k, &(void *){(void *)(uintptr_t)implementation}, sizeof(void *)))
            at = at ? -1 : k;
    if (at <= 0)
        Py_RETURN_FALSE;
    undefined = *torch.gradient((const void *)(uintptr_t)implementation);
    word_at = at;
    Py_RETURN_TRUE;
}
