/* Publishing to a latch of the page in one call: `Latch.publish` of layout.py, which defines it.
 *
 * Only the stable ABI of Python 3.11 is used. The interpreter's lock is held throughout: to threads and signal handlers of the rank a value is published at once.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

static uint32_t table[256];

static void make_table(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ 0xEDB88320u : crc >> 1;
        table[byte] = crc;
    }
}

/* zlib's */
static uint32_t crc32_of(const unsigned char *body, size_t num_bytes, uint32_t seed)
{
    uint32_t crc = ~seed;
    for (size_t k = 0; k < num_bytes; k++)
        crc = table[(crc ^ body[k]) & 255] ^ crc >> 8;
    return ~crc;
}

/* A latch: the sequence, and two slots of a check and a body each. */
static PyObject *publish(PyObject *module, PyObject *args)
{
    Py_buffer latch, body;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*y*:publish", &latch, &body))
        return NULL;
    int fits = latch.len == 8 + 2 * (8 + body.len) && body.len % 8 == 0 && (uintptr_t)latch.buf % 8 == 0;
    if (fits) {
        uint64_t *words = latch.buf, sequence = words[0] + 1;
        uint64_t *slot = words + 1 + (sequence & 1) * (size_t)(1 + body.len / 8);
        memcpy(slot + 1, body.buf, (size_t)body.len);
        __atomic_store_n(slot, crc32_of(body.buf, (size_t)body.len, (uint32_t)sequence), __ATOMIC_RELEASE);
        __atomic_store_n(words, sequence, __ATOMIC_RELEASE);
    } else {
        PyErr_SetString(PyExc_ValueError, "the body does not fit the latch");
    }
    PyBuffer_Release(&latch);
    PyBuffer_Release(&body);
    if (!fits)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"publish", publish, METH_VARARGS, "publish(latch, body): replace the value of a latch."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_latch", "Latches of the page.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__latch(void)
{
    make_table();
    return PyModule_Create(&definition);
}
