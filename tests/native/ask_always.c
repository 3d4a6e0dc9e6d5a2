// Threads that call functions of the library all the time, for test_fork.py: Python's own would wait for a fork to end.

#include <pthread.h>
#include <stdint.h>

typedef int (*library_call)(int64_t id);

static void * call_always(void * call) {
    while (1) {
        ((library_call) call)(-1);
    }
    return call;
}

int start(library_call call) {
    pthread_t thread;
    return pthread_create(&thread, 0, call_always, (void *) call);
}
