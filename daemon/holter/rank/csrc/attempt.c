/* One part of a hook by itself: `Guard.attempt` of guard.py, which defines it, without a frame of Python around each part.
 *
 * Only the stable ABI of Python 3.11 is used.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

/* attempt(call, ...): what the call gives; what it raises is told to `failed`, which raises what is not ours to swallow, and None is given. */
static PyObject *attempt(PyObject *failed, PyObject *args, PyObject *named)
{
    PyObject *type, *error, *trace, *told;
    if (PyTuple_Size(args) < 1) {
        PyErr_SetString(PyExc_TypeError, "attempt() needs what to call");
        return NULL;
    }
    PyObject *call = PyTuple_GetItem(args, 0), *rest = PyTuple_GetSlice(args, 1, PyTuple_Size(args));
    if (!rest)
        return NULL;
    PyObject *result = PyObject_Call(call, rest, named);
    Py_DECREF(rest);
    if (result || !PyErr_ExceptionMatches(PyExc_Exception))
        return result;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace)
        PyException_SetTraceback(error, trace);
    told = PyObject_CallFunctionObjArgs(failed, call, error, NULL);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return told;
}

static PyMethodDef attempt_method = {"attempt", (PyCFunction)(void (*)(void))attempt, METH_VARARGS | METH_KEYWORDS,
                                     "attempt(call, ...): what it gives; None, and told, if it raises."};

static PyObject *attempting(PyObject *module, PyObject *failed)
{
    (void)module;
    return PyCFunction_New(&attempt_method, failed);
}

static PyMethodDef methods[] = {
    {"attempting", attempting, METH_O, "attempting(failed): an `attempt` that tells `failed` of each call that raised, and of what."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_attempt", "Parts of hooks.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__attempt(void)
{
    return PyModule_Create(&definition);
}
