// Keeps Vulkan buffers alive until the process ends: preloaded next to Mesa's lavapipe before 23.
//
// There, a dispatch that binds fewer or other storage buffers than the one before lets go of the old ones, which may have
// been destroyed since: ggml's Vulkan backend destroys its scratch buffers whenever a larger batch needs larger ones, as
// Vulkan allows once the device is idle. The driver then reads and writes freed memory. With this file in front of the
// loader nothing is ever destroyed.
//
//   cc -shared -fPIC -o keep_buffers.so keep_buffers.c -ldl
//   LD_PRELOAD=./keep_buffers.so ...
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

typedef void (*function)(void);
typedef function (*lookup)(void * handle, const char * name);

static lookup of_instance;
static lookup of_device;

static void keep(void * device, void * object, const void * allocator) {
    (void) device;
    (void) object;
    (void) allocator;
}

static function choose(lookup original, void * handle, const char * name);

static function device_function(void * device, const char * name) {
    return choose(of_device, device, name);
}

static function choose(lookup original, void * handle, const char * name) {
    if (strcmp(name, "vkDestroyBuffer") == 0 || strcmp(name, "vkFreeMemory") == 0) {
        return (function) keep;
    }
    const function found = original(handle, name);
    if (found != NULL && strcmp(name, "vkGetDeviceProcAddr") == 0) {
        of_device = (lookup) found;
        return (function) device_function;
    }
    return found;
}

function vkGetInstanceProcAddr(void * instance, const char * name) {
    if (of_instance == NULL) {
        of_instance = (lookup) dlsym(RTLD_NEXT, "vkGetInstanceProcAddr");
        if (of_instance == NULL) { // the loader came with a library that was opened later
            of_instance = (lookup) dlsym(dlopen("libvulkan.so.1", RTLD_NOW | RTLD_GLOBAL), "vkGetInstanceProcAddr");
        }
    }
    return choose(of_instance, instance, name);
}
