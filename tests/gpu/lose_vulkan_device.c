// A library for LD_PRELOAD: a Vulkan device is lost. From the n-th vkQueueSubmit on (LOSE_AT in the environment) each one
// returns VK_ERROR_DEVICE_LOST, and so does every wait for a fence; LOSE_AS=memory returns VK_ERROR_OUT_OF_DEVICE_MEMORY.
//
//     cc -shared -fPIC -o lose.so lose_vulkan_device.c -ldl && LOSE_AT=500 LD_PRELOAD=./lose.so moeedge chat ...
//
// ggml's Vulkan backend asks vkGetDeviceProcAddr and vkGetInstanceProcAddr for each function; we answer for these two. No
// Vulkan headers are needed: handles are pointers or 64-bit integers, and results are ints.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*function)(void);
typedef function (*get_address)(void * owner, const char * name);
typedef int (*queue_submit)(void * queue, uint32_t n_submits, const void * submits, uint64_t fence);
typedef int (*fence_status)(void * device, uint64_t fence);
typedef int (*wait_for_fences)(void * device, uint32_t n, const uint64_t * fences, uint32_t all, uint64_t timeout_ns);

enum { DEVICE_LOST = -4, OUT_OF_DEVICE_MEMORY = -2 };

static atomic_long     n_submitted;
static queue_submit    real_submit;
static fence_status    real_status;
static wait_for_fences real_wait;

static int error_of_submit(void) {
    const char * as = getenv("LOSE_AS");
    return as && strcmp(as, "memory") == 0 ? OUT_OF_DEVICE_MEMORY : DEVICE_LOST;
}

static int is_lost(void) {
    const char * at = getenv("LOSE_AT");
    return at && n_submitted >= atol(at) && error_of_submit() == DEVICE_LOST;
}

static int submit(void * queue, uint32_t n_submits, const void * submits, uint64_t fence) {
    const char * at = getenv("LOSE_AT");
    const long   n  = ++n_submitted;
    if (at && n >= atol(at)) {
        if (n == atol(at)) {
            fprintf(stderr, "vkQueueSubmit %ld fails\n", n);
        }
        return error_of_submit();
    }
    return real_submit(queue, n_submits, submits, fence);
}

static int status(void * device, uint64_t fence) {
    return is_lost() ? DEVICE_LOST : real_status(device, fence);
}

static int wait(void * device, uint32_t n, const uint64_t * fences, uint32_t all, uint64_t timeout_ns) {
    return is_lost() ? DEVICE_LOST : real_wait(device, n, fences, all, timeout_ns);
}

static function replaced(const char * name, function real) {
    if (strcmp(name, "vkQueueSubmit") == 0) {
        real_submit = (queue_submit) real;
        return (function) submit;
    }
    if (strcmp(name, "vkGetFenceStatus") == 0) {
        real_status = (fence_status) real;
        return (function) status;
    }
    if (strcmp(name, "vkWaitForFences") == 0) {
        real_wait = (wait_for_fences) real;
        return (function) wait;
    }
    return real;
}

static function ask(const char * getter, void * owner, const char * name) {
    static get_address of_instance, of_device;
    get_address *      real = strcmp(getter, "vkGetDeviceProcAddr") == 0 ? &of_device : &of_instance;
    if (!*real) {
        *(void **) real = dlsym(RTLD_NEXT, getter);
        if (!*real) { // libvulkan was loaded later, by the backend, apart from the global symbols
            void * library = dlopen("libvulkan.so.1", RTLD_NOW);
            *(void **) real = library ? dlsym(library, getter) : NULL;
        }
        if (!*real) {
            return NULL;
        }
    }
    function found = (*real)(owner, name);
    return found ? replaced(name, found) : NULL;
}

__attribute__((visibility("default"))) function vkGetDeviceProcAddr(void * device, const char * name) {
    return ask("vkGetDeviceProcAddr", device, name);
}

__attribute__((visibility("default"))) function vkGetInstanceProcAddr(void * instance, const char * name) {
    if (strcmp(name, "vkGetDeviceProcAddr") == 0) {
        return (function) vkGetDeviceProcAddr;
    }
    return ask("vkGetInstanceProcAddr", instance, name);
}
