/* Where the tensors of a list lie, asked in one call: through DLPack's table of C functions, which torch offers on its type.
 *
 * Only what needs no second thought is answered: a tensor of one of the given types exactly, contiguous, real, with memory. For anything else the
 * caller looks tensor by tensor. The structures are those of dlpack.h, version 1, whose layout is fixed.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>

#include "look.h"

struct dl_tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct dl_functions {
    uint32_t major, minor;
    struct dl_functions *older;
    void *allocate, *from_object, *to_object;
    int (*look_at)(void *object, struct dl_tensor *);
    void *current_stream;
};

enum { DL_COMPLEX = 5, MAX_TYPES = 4 };
enum { SAME = 0, MOVED = 1, OTHER = 2, NOT_PLAIN = 3 };

/* What a table of chunks depends on, but for the address. */
struct layout {
    uint64_t numel, kind;
};

static int is_contiguous(const struct dl_tensor *tensor)
{
    int64_t expected = 1;
    if (!tensor->strides)
        return 1;
    for (int k = tensor->ndim - 1; k >= 0; k--) {
        if (tensor->shape[k] != 1 && tensor->strides[k] != expected)
            return 0;
        expected *= tensor->shape[k];
    }
    return 1;
}

static int look_at(const struct dl_functions *functions, PyObject *object, struct layout *layout, uint64_t *address)
{
    struct dl_tensor tensor = {0};
    if (functions->look_at(object, &tensor)) {
        PyErr_Clear();
        return -1;
    }
    uint64_t numel = 1;
    for (int k = 0; k < tensor.ndim; k++)
        numel *= (uint64_t)tensor.shape[k];
    *address = numel ? (uint64_t)(uintptr_t)tensor.data + tensor.byte_offset : 0;
    if (tensor.code == DL_COMPLEX || (numel && (!tensor.data || !is_contiguous(&tensor))))
        return -1;
    layout->numel = numel;
    layout->kind = (uint64_t)tensor.code | (uint64_t)tensor.bits << 8 | (uint64_t)(tensor.lanes & 0xFF) << 16 |
                   (uint64_t)(tensor.device_type & 0xFF) << 24 | (uint64_t)(uint32_t)tensor.device_id << 32;
    return 0;
}

static int look_at_all(const struct dl_functions *functions, PyObject *tensors, PyObject *const *types, Py_ssize_t num_types,
                       struct layout *layouts, uint64_t *addresses)
{
    int found = SAME;
    for (Py_ssize_t k = 0; k < PyList_Size(tensors); k++) {
        PyObject *object = PyList_GetItem(tensors, k);
        struct layout layout;
        uint64_t address;
        Py_ssize_t type = 0;
        while (type < num_types && (PyObject *)Py_TYPE(object) != types[type])
            type++;
        if (type == num_types || look_at(functions, object, &layout, &address))
            return NOT_PLAIN;
        if (layout.numel != layouts[k].numel || layout.kind != layouts[k].kind)
            found = OTHER;
        else if (address != addresses[k] && found == SAME)
            found = MOVED;
        layouts[k] = layout;
        addresses[k] = address;
    }
    return found;
}

PyObject *py_look(PyObject *self, PyObject *args)
{
    PyObject *capsule, *tensors, *type_tuple, *types[MAX_TYPES], *result = NULL;
    Py_buffer layouts = {0}, addresses = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "OO!O!w*w*", &capsule, &PyList_Type, &tensors, &PyTuple_Type, &type_tuple, &layouts, &addresses))
        return NULL;
    struct dl_functions *functions = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_ssize_t num_types = PyTuple_Size(type_tuple), count = PyList_Size(tensors);
    if (!functions)
        goto release;
    while (functions && functions->major != 1)
        functions = functions->older;
    if (!functions || !functions->look_at) {
        PyErr_SetString(PyExc_ImportError, "torch offers no DLPack functions of version 1");
        goto release;
    }
    if (num_types > MAX_TYPES || layouts.len != count * (Py_ssize_t)sizeof(struct layout) ||
        addresses.len != count * (Py_ssize_t)sizeof(uint64_t)) {
        PyErr_SetString(PyExc_ValueError, "the buffers do not belong to a list of this length");
        goto release;
    }
    for (Py_ssize_t k = 0; k < num_types; k++)
        types[k] = PyTuple_GetItem(type_tuple, k);
    result = PyLong_FromLong(look_at_all(functions, tensors, types, num_types, layouts.buf, addresses.buf));
release:
    PyBuffer_Release(&layouts);
    PyBuffer_Release(&addresses);
    return result;
}
