/* Living objects of the interpreter, looked up in one call, so that no other thread runs while the list of all of them exists.
 *
 * That list refers to everything, also to a tuple that another thread is just filling (`tuple(generator)`). Python gives such a tuple its final
 * size only while nobody else refers to it, and raises SystemError in that thread otherwise. No Python code may run in here: classes are told
 * apart by their address, since a metaclass may define how they compare. Only the stable ABI of Python 3.11 is used.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>

static int by_address(const void *left, const void *right)
{
    uintptr_t a = *(const uintptr_t *)left, b = *(const uintptr_t *)right;
    return (a > b) - (a < b);
}

/* The objects of a list that are of one of these classes (sorted addresses), or with `others` those that are not. */
static PyObject *chosen(PyObject *things, const uintptr_t *kinds, size_t count, int others)
{
    PyObject *found = PyList_New(0);
    Py_ssize_t size = PyList_Size(things);
    for (Py_ssize_t k = 0; found && k < size; k++) {
        PyObject *thing = PyList_GetItem(things, k);
        uintptr_t kind = (uintptr_t)Py_TYPE(thing);
        int is_one = bsearch(&kind, kinds, count, sizeof kind, by_address) != NULL;
        if (is_one != others && PyList_Append(found, thing))
            Py_CLEAR(found);
    }
    return found;
}

static PyObject *asked(const char *name, PyObject *argument)
{
    PyObject *gc = PyImport_ImportModule("gc"), *call = gc ? PyObject_GetAttrString(gc, name) : NULL;
    PyObject *things = call ? PyObject_CallFunctionObjArgs(call, argument, NULL) : NULL;
    Py_XDECREF(call);
    Py_XDECREF(gc);
    return things;
}

static PyObject *of_kinds(PyObject *module, PyObject *argument)
{
    PyObject *found = NULL, *things = NULL;
    (void)module;
    if (!PyList_Check(argument)) {
        PyErr_SetString(PyExc_TypeError, "a list of classes is wanted");
        return NULL;
    }
    size_t count = (size_t)PyList_Size(argument);
    uintptr_t *kinds = PyMem_Malloc((count + 1) * sizeof *kinds);
    if (!kinds)
        return PyErr_NoMemory();
    for (size_t k = 0; k < count; k++)
        kinds[k] = (uintptr_t)PyList_GetItem(argument, (Py_ssize_t)k);
    qsort(kinds, count, sizeof *kinds, by_address);
    things = asked("get_objects", NULL);
    if (things)
        found = chosen(things, kinds, count, 0);
    Py_XDECREF(things);
    PyMem_Free(kinds);
    return found;
}

static PyObject *holders(PyObject *module, PyObject *thing)
{
    uintptr_t tuple = (uintptr_t)&PyTuple_Type;
    PyObject *things = asked("get_referrers", thing), *found = things ? chosen(things, &tuple, 1, 1) : NULL;
    (void)module;
    Py_XDECREF(things);
    return found;
}

static PyMethodDef methods[] = {
    {"of_kinds", of_kinds, METH_O, "of_kinds(classes): all living objects of exactly these classes."},
    {"holders", holders, METH_O, "holders(thing): the objects that refer to it, without tuples."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_living", "Living objects of the interpreter.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__living(void) { return PyModule_Create(&definition); }
