/* A signal that asks the rank to end is passed on to the halt agent, which may save first; nobody's silence keeps the process alive.

       SIGTERM -> its number into a pipe -> training goes on, the halt agent's thread reads it
               -> a timer: SIGTERM once more in GRACE_S, and that one has its default action

   The agent answers with `grant`: so many seconds more, or as long as it takes. A thread that cannot answer, because the interpreter's lock is
   held or the interpreter is ending, grants nothing, and the process ends as it would have, that little later. Signals other
   than SIGTERM only wake the agent.

   Python does not know of it: signal.getsignal says SIG_DFL as before, and a handler that the script installs, before or after, is the one that
   counts. Everything called in the handler is async-signal-safe. A forked child has no such timer and is not the rank: it dies at once. */

#define _GNU_SOURCE
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define GRACE_S 3

static pid_t owner;
static int pipe_end = -1;
static struct stat pipe_identity;
static timer_t timer;
static int has_timer;

static int is_pipe_ours(void) {
    struct stat found;
    return pipe_end >= 0 && fstat(pipe_end, &found) == 0 && found.st_ino == pipe_identity.st_ino &&
           found.st_dev == pipe_identity.st_dev;
}

static int is_set(timer_t which) {
    struct itimerspec left;
    return timer_gettime(which, &left) == 0 && (left.it_value.tv_sec || left.it_value.tv_nsec);
}

static int set_timer(double seconds) {
    struct itimerspec when;
    memset(&when, 0, sizeof when);
    when.it_value.tv_sec = (time_t)seconds;
    when.it_value.tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9);
    return timer_settime(timer, 0, &when, NULL);
}

static void die_of(int number) {
    struct sigaction plain;
    memset(&plain, 0, sizeof plain);
    plain.sa_handler = SIG_DFL;
    sigemptyset(&plain.sa_mask);
    sigaction(number, &plain, NULL);
    kill(getpid(), number);
}

static void on_signal(int number, siginfo_t *info, void *context) {
    (void)context;
    int saved_errno = errno;
    unsigned char word = (unsigned char)number;
    if (getpid() != owner || !is_pipe_ours() || (number == SIGTERM && (info->si_code == SI_TIMER || !has_timer))) {
        die_of(number);
    } else {
        /* Told twice, the time that was granted stands. */
        if (number == SIGTERM && !is_set(timer)) set_timer(GRACE_S);
        /* A full pipe wakes the halt agent as well as one byte more would. */
        ssize_t written = write(pipe_end, &word, 1);
        (void)written;
    }
    errno = saved_errno;
}

static int is_ours(int number) {
    struct sigaction present;
    return sigaction(number, NULL, &present) == 0 && (present.sa_flags & SA_SIGINFO) &&
           present.sa_sigaction == on_signal;
}

static PyObject *install(PyObject *module, PyObject *args) {
    (void)module;
    int descriptor, number;
    if (!PyArg_ParseTuple(args, "ii:install", &descriptor, &number)) return NULL;
    if (fstat(descriptor, &pipe_identity) != 0) return PyErr_SetFromErrno(PyExc_OSError);
    struct sigaction present, ours;
    if (sigaction(number, NULL, &present) != 0) return PyErr_SetFromErrno(PyExc_OSError);
    if ((present.sa_flags & SA_SIGINFO) || present.sa_handler != SIG_DFL) return PyBool_FromLong(is_ours(number));
    /* Timers are not inherited: a child that installs anew needs its own. */
    if (!has_timer || owner != getpid()) {
        struct sigevent event;
        memset(&event, 0, sizeof event);
        event.sigev_notify = SIGEV_SIGNAL;
        event.sigev_signo = SIGTERM;
        has_timer = timer_create(CLOCK_MONOTONIC, &event, &timer) == 0;
        if (!has_timer) return PyErr_SetFromErrno(PyExc_OSError);
    }
    owner = getpid();
    pipe_end = descriptor;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_signal;
    ours.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    if (sigaction(number, &ours, NULL) != 0) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_TRUE;
}

static PyObject *grant(PyObject *module, PyObject *args) {
    (void)module;
    double seconds;
    if (!PyArg_ParseTuple(args, "d:grant", &seconds)) return NULL;
    if (has_timer && owner == getpid() && set_timer(seconds) != 0) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *die(PyObject *module, PyObject *args) {
    (void)module;
    int number;
    if (!PyArg_ParseTuple(args, "i:die", &number)) return NULL;
    if (has_timer && owner == getpid()) set_timer(0);
    die_of(number);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"install", install, METH_VARARGS,
     "install(descriptor, signal): write the signal's number there instead of dying of it; False: somebody handles it already."},
    {"grant", grant, METH_VARARGS, "grant(seconds): live so long after a SIGTERM; 0: as long as it takes."},
    {"die", die, METH_VARARGS, "die(signal): by its default action, now."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_termination", "Signals that ask the rank to end.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__termination(void) { return PyModule_Create(&definition); }
