/* look(capsule, list of tensors, types, layouts, addresses): 0 as before, 1 the same elsewhere, 2 others, 3 look yourself */
/* see(list of tensors, types, of their gradients?): (addresses, versions, layouts), each in bytes; None: look yourself */
/* bind(functions of torch, a tensor, where it is implemented, bytes of its object): whether `see` sees from now on */
#ifndef HOLTER_LOOK_H
#define HOLTER_LOOK_H

PyObject *py_look(PyObject *self, PyObject *args);
PyObject *py_see(PyObject *self, PyObject *args);
PyObject *py_kinds(PyObject *self, PyObject *args);
PyObject *py_bind(PyObject *self, PyObject *args);

#endif
