/* A crashing rank tells its sidecar, and gives it a moment to look, before it dies exactly as it would have died.

       SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL
         -> {signal, thread} to the sidecar's socket -> wait for one byte back, at most WAIT_MS
         -> previous disposition restored -> the same signal once more

   A fault (si_code > 0) comes back by itself when the handler returns: the instruction runs again, and the core shows it. What was sent
   (abort, kill) is queued again with its siginfo while it is blocked, and arrives when the handler has returned, with the stack as it was.
   So a handler that stood here before us, faulthandler's above all, sees what it would have seen; one that comes after us calls us.

   Everything called in the handler is async-signal-safe. A forked child is not the rank: it passes the signal on at once. */

#define _GNU_SOURCE
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define WAIT_MS 1500
#define STACK_BYTES (64 * 1024)

static const int SIGNALS[] = {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL};
#define NUM_SIGNALS ((int)(sizeof SIGNALS / sizeof *SIGNALS))

struct crash_word {
    int32_t signal;
    int32_t thread;
};

static struct sigaction previous[NUM_SIGNALS];
static int is_installed[NUM_SIGNALS];
static pid_t owner;
static int line = -1;
static struct stat line_identity;
static pid_t waiting_thread; /* the thread that waits for the answer; 0: none */

static long long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

/* A script may have closed our descriptor, and its number may be another file's by now. */
static int is_line_ours(void) {
    struct stat found;
    return line >= 0 && fstat(line, &found) == 0 && S_ISSOCK(found.st_mode) &&
           found.st_ino == line_identity.st_ino && found.st_dev == line_identity.st_dev;
}

static void wait_for_answer(void) {
    struct pollfd answer = {.fd = line, .events = POLLIN};
    long long deadline = now_ms() + WAIT_MS;
    for (long long left = WAIT_MS; left > 0; left = deadline - now_ms()) {
        int found = poll(&answer, 1, (int)left);
        if (found > 0 || (found < 0 && errno != EINTR)) return; /* answered, or nobody is there */
    }
}

static void tell_and_wait(int number) {
    pid_t thread = (pid_t)syscall(SYS_gettid), nobody = 0;
    if (!__atomic_compare_exchange_n(&waiting_thread, &nobody, thread, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        /* Another thread crashed first: it is not to be cut off. The same thread: our own handler crashed. */
        if (nobody != thread) wait_for_answer();
        return;
    }
    struct crash_word word = {number, (int32_t)thread};
    if (send(line, &word, sizeof word, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof word) {
        wait_for_answer();
        char answer;
        recv(line, &answer, 1, MSG_DONTWAIT); /* a process that survives may crash again */
    }
    __atomic_store_n(&waiting_thread, 0, __ATOMIC_SEQ_CST);
}

static int comes_back_by_itself(int number, const siginfo_t *info) {
    return number != SIGABRT && info->si_code > 0 && !(number == SIGBUS && info->si_code == BUS_MCEERR_AO);
}

static void on_signal(int number, siginfo_t *info, void *context) {
    (void)context;
    int saved_errno = errno;
    if (getpid() == owner && is_line_ours()) tell_and_wait(number);
    for (int i = 0; i < NUM_SIGNALS; i++)
        if (SIGNALS[i] == number) sigaction(number, &previous[i], NULL);
    if (!comes_back_by_itself(number, info) &&
        syscall(SYS_rt_tgsigqueueinfo, getpid(), (pid_t)syscall(SYS_gettid), number, info) != 0)
        raise(number);
    errno = saved_errno;
}

static int is_ours(int number) {
    struct sigaction present;
    return sigaction(number, NULL, &present) == 0 && (present.sa_flags & SA_SIGINFO) &&
           present.sa_sigaction == on_signal;
}

/* So that an overflow of the main thread's stack can be told too; one that is there already is kept. */
static void give_stack(void) {
    stack_t stack;
    if (sigaltstack(NULL, &stack) != 0 || !(stack.ss_flags & SS_DISABLE)) return;
    memset(&stack, 0, sizeof stack);
    stack.ss_size = STACK_BYTES;
    stack.ss_sp = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack.ss_sp != MAP_FAILED) sigaltstack(&stack, NULL);
}

static PyObject *install(PyObject *module, PyObject *args) {
    (void)module;
    int descriptor;
    if (!PyArg_ParseTuple(args, "i:install", &descriptor)) return NULL;
    if (fstat(descriptor, &line_identity) != 0) return PyErr_SetFromErrno(PyExc_OSError);
    line = descriptor;
    owner = getpid();
    give_stack();
    struct sigaction ours;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_signal;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigemptyset(&ours.sa_mask);
    for (int i = 0; i < NUM_SIGNALS; i++) {
        if (is_ours(SIGNALS[i]) || sigaction(SIGNALS[i], NULL, &previous[i]) != 0) continue;
        if (!(previous[i].sa_flags & SA_SIGINFO) && previous[i].sa_handler == SIG_IGN) continue;
        is_installed[i] = sigaction(SIGNALS[i], &ours, NULL) == 0;
    }
    Py_RETURN_NONE;
}

static PyObject *uninstall(PyObject *module, PyObject *args) {
    (void)module;
    (void)args;
    for (int i = 0; i < NUM_SIGNALS; i++) {
        if (is_installed[i] && is_ours(SIGNALS[i])) sigaction(SIGNALS[i], &previous[i], NULL);
        is_installed[i] = 0;
    }
    line = -1;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"install", install, METH_VARARGS, "Tell crashes of this process on a socket; signals that are ignored stay so."},
    {"uninstall", uninstall, METH_NOARGS, "Put back what was there, where nobody stands before us by now."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_crash_notice", "A crashing rank tells its sidecar.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__crash_notice(void) { return PyModule_Create(&definition); }
