/* look(capsule, list of tensors, types, layouts, addresses): 0 as before, 1 the same elsewhere, 2 others, 3 look yourself */
#ifndef HOLTER_LOOK_H
#define HOLTER_LOOK_H

PyObject *py_look(PyObject *self, PyObject *args);

#endif
