// A ggml backend with toy devices that compute nothing, for tests of what happens before a backend is used.
// Macros: ENTRY (name of the entry point), NAME, API_VERSION, N_DEVICES, HOST_POINTER (devices take host memory as
// buffers, as Metal's do), SCORE, CALLS (a function that it needs), OWN_GGML (it brings a function of libggml-base).
// The structures are those of ggml-backend-impl.h, as far as they are read.
#include <stdbool.h>
#include <stddef.h>

#ifndef NAME
#define NAME "Toy"
#endif
#ifndef API_VERSION
#define API_VERSION 2
#endif
#ifndef N_DEVICES
#define N_DEVICES 1
#endif
#ifndef HOST_POINTER
#define HOST_POINTER false
#endif

struct properties {
    const char * name;
    const char * description;
    size_t memory_free;
    size_t memory_total;
    int type;
    const char * device_id;
    bool caps[5];
};

struct device {
    const char * (*get_name)(struct device *);
    const char * (*get_description)(struct device *);
    void (*get_memory)(struct device *, size_t *, size_t *);
    int (*get_type)(struct device *);
    void (*get_props)(struct device *, struct properties *);
    void * others[10];
    void * reg;
    void * context;
};

struct registry {
    int api_version;
    const char * (*get_name)(struct registry *);
    size_t (*get_device_count)(struct registry *);
    struct device * (*get_device)(struct registry *, size_t);
    void * (*get_proc_address)(struct registry *, const char *);
    void * context;
};

static const char * device_name(struct device * device) { (void) device; return NAME "0"; }
static const char * description(struct device * device) { (void) device; return "a toy"; }
static void memory(struct device * device, size_t * free, size_t * total) { (void) device; *free = 1; *total = 2; }
static int type(struct device * device) { (void) device; return 1; } // GPU

static void props(struct device * device, struct properties * out) {
    struct properties found = { NAME "0", "a toy", 1, 2, 1, NULL, { false, false, HOST_POINTER, false, false } };
    (void) device;
    *out = found;
}

static const char * name(struct registry * registry) { (void) registry; return NAME; }
static size_t count(struct registry * registry) { (void) registry; return N_DEVICES; }
static struct registry toy_registry;
static struct device toy_device = { device_name, description, memory, type, props, { NULL }, &toy_registry, NULL };
static struct device * get(struct registry * registry, size_t index) { (void) registry; (void) index; return &toy_device; }
static struct registry toy_registry = { API_VERSION, name, count, get, NULL, NULL };

#ifdef SCORE
int ggml_backend_score(void);
int ggml_backend_score(void) { return SCORE; }
#endif
#ifdef CALLS
void CALLS(void);
void * used(void);
void * used(void) { return (void *) CALLS; }
#endif
#ifdef OWN_GGML
void ggml_backend_buffer_init(void);
void ggml_backend_buffer_init(void) {}
#endif
#ifdef ENTRY
struct registry * ENTRY(void);
struct registry * ENTRY(void) { return &toy_registry; }
#endif
