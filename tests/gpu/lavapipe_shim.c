// Preloaded where ggml's Vulkan backend runs on Mesa's lavapipe: keeps buffers, and sleeps where the backend would spin.
//
// Lavapipe 22.3 lets go of the storage buffers of an earlier dispatch when a later one binds others, even if they have been
// destroyed since. ggml destroys its scratch buffers whenever a larger batch needs larger ones, as Vulkan allows once the
// device is idle; the driver then reads and writes freed memory. So nothing is destroyed before the process ends.
// ggml waits for the end of a graph by asking for the fence's status again and again: on a device that computes on the same
// cores that takes the time which it waits for.
//
//   cc -shared -fPIC -o lavapipe_shim.so lavapipe_shim.c -ldl
//   LD_PRELOAD=./lavapipe_shim.so ...
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { NOT_READY = 1, TIMEOUT = 2 };           // VkResult
static const uint64_t longest_wait_ns = 1000000;

typedef void (*function)(void);
typedef function (*lookup)(void * handle, const char * name);
typedef int32_t (*wait_function)(void * device, uint32_t count, const void ** fences, uint32_t all, uint64_t timeout_ns);

static lookup        of_instance;
static lookup        of_device;
static wait_function wait_for_fences;

static void keep(void * device, void * object, const void * allocator) {
    (void) device;
    (void) object;
    (void) allocator;
}

static int32_t fence_status(void * device, const void * fence) {
    const int32_t result = wait_for_fences(device, 1, &fence, 1, longest_wait_ns);
    return result == TIMEOUT ? NOT_READY : result;
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
    if (found == NULL) {
        return NULL;
    }
    if (strcmp(name, "vkGetDeviceProcAddr") == 0) {
        of_device = (lookup) found;
        return (function) device_function;
    }
    if (strcmp(name, "vkGetFenceStatus") == 0) {
        wait_for_fences = (wait_function) original(handle, "vkWaitForFences");
        return (function) fence_status;
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
