// Backend (queue), device and registry of the counting device: see counting-device.h.

#include <cstring>
#include <atomic>
#include <memory>
#include <stdexcept>

#include "device-memory.h"
#include "device.h"
#include "ggml-backend.h"
#include "graph-snapshot.h"
#include "ledger.h"
#include "transfers.h"

namespace counting {

static constexpr int64_t offload_min_tokens = 32; // as ggml's CUDA backend

struct instance {
    device_queue   queue;
    ggml_backend_t cpu;
};

struct device_event {
    int    number;
    bool   is_recorded = false;
    moment point;
};

static instance * instance_of(ggml_backend_t backend) {
    return (instance *) backend->context;
}

static device_event * event_of(ggml_backend_event_t event) {
    return (device_event *) event->context;
}

// queue

static const char * backend_get_name(ggml_backend_t) {
    return device_name;
}

static void backend_free(ggml_backend_t backend) {
    std::lock_guard<std::mutex> lock(device_lock());
    instance *                  self = instance_of(backend);
    ggml_backend_t              cpu  = self->cpu;
    delete self; // executes what is queued
    ggml_backend_free(cpu);
    delete backend;
}

static void add_transfer(ggml_backend_t backend, enum counting_kind kind, const transfer & t) {
    std::lock_guard<std::mutex> lock(device_lock());
    instance *                  self   = instance_of(backend);
    const bool                  pinned = is_pinned(t.data);
    const int                   waits  = kind == COUNTING_GET_ASYNC && !pinned ? COUNTING_WAITS : 0;
    GGML_ASSERT(is_on_device(t.tensor) && "asynchronous transfers need a tensor on the device");
    add_record(kind, self->queue.id, t.tensor->name, t.bytes(), waits | (pinned ? COUNTING_PINNED : 0));
    self->queue.issue(kind == COUNTING_SET_ASYNC ? make_set(t) : make_get(t));
}

static void backend_set_tensor_async(ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    add_transfer(backend, COUNTING_SET_ASYNC, { tensor, const_cast<void *>(data), offset, size });
}

static void backend_get_tensor_async(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    add_transfer(backend, COUNTING_GET_ASYNC, { tensor, data, offset, size });
}

static void backend_set_tensor_2d_async(ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset, size_t size,
                                        size_t n_copies, size_t stride_tensor, size_t stride_data) {
    add_transfer(backend, COUNTING_SET_ASYNC,
                 { tensor, const_cast<void *>(data), offset, size, n_copies, stride_tensor, stride_data });
}

static void backend_get_tensor_2d_async(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset, size_t size,
                                        size_t n_copies, size_t stride_tensor, size_t stride_data) {
    add_transfer(backend, COUNTING_GET_ASYNC, { tensor, data, offset, size, n_copies, stride_tensor, stride_data });
}

static bool is_ours(ggml_backend_t backend) {
    return backend->iface.get_name == backend_get_name;
}

static bool backend_cpy_tensor_async(ggml_backend_t from, ggml_backend_t to, const ggml_tensor * src, ggml_tensor * dst) {
    if (!is_ours(from) || !is_ours(to) || !is_on_device(src) || !is_on_device(dst)) {
        return false;
    }
    std::lock_guard<std::mutex> lock(device_lock());
    device_queue &              source = instance_of(from)->queue;
    device_queue &              target = instance_of(to)->queue;
    add_record(COUNTING_COPY_ASYNC, source.id, src->name, ggml_nbytes(src), 0);
    // as in CUDA: the copy is in the source's queue, and the target's waits for it
    source.issue(make_copy(src, dst));
    if (&source != &target) {
        target.wait_for(source.now());
    }
    return true;
}

static int wait_flags(bool has_waited, int n_graphs) {
    return (has_waited ? COUNTING_WAITS : 0) | (n_graphs > 0 ? COUNTING_ROUND_TRIP : 0);
}

static void backend_synchronize(ggml_backend_t backend) {
    std::lock_guard<std::mutex> lock(device_lock());
    const device_queue &        queue      = instance_of(backend)->queue;
    const bool                  has_waited = queue.has_unfinished();
    const int                   n_graphs   = device_queue::finish(queue.now());
    add_record(COUNTING_SYNC, queue.id, "", 0, wait_flags(has_waited, n_graphs));
}

// whether this launch is the one that fails
static bool must_fail() {
    settings & now = current_settings();
    if (now.fail_graph == 0) {
        return false;
    }
    now.fail_graph--;
    if (now.fail_graph > 0) {
        return false;
    }
    now.fail_graph = now.fail_mode == 1 ? 1 : 0;
    return true;
}

static enum ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    std::lock_guard<std::mutex> lock(device_lock());
    instance *                  self     = instance_of(backend);
    auto                        snapshot = std::make_shared<graph_snapshot>(graph);
    if (snapshot->n_computing == 0) {
        return GGML_STATUS_SUCCESS;
    }
    if (!snapshot->foreign.empty()) {
        add_hazard("graph " + snapshot->name() + ": " + snapshot->foreign + " is not in the device's memory");
        return GGML_STATUS_FAILED;
    }
    const bool fails = must_fail();
    add_record(COUNTING_GRAPH, self->queue.id, snapshot->name().c_str(), 0, fails ? COUNTING_FAILED : 0, snapshot->n_computing);
    if (fails) {
        switch (current_settings().fail_mode) {
            case 2:  GGML_ABORT("%s: a graph failed, as it was told to", device_name);
            case 3:  throw std::runtime_error("the counting device is lost, as it was told to");
            default: return GGML_STATUS_FAILED;
        }
    }
    operation op;
    op.name     = "graph " + snapshot->name();
    op.is_graph = true;
    op.reads    = snapshot->reads;
    op.writes   = snapshot->writes;
    op.tables   = snapshot->tables;
    op.picked   = [snapshot] { return snapshot->picked(); };
    op.run      = [snapshot, cpu = self->cpu] {
        const enum ggml_status status = ggml_backend_graph_compute(cpu, snapshot->graph());
        GGML_ASSERT(status == GGML_STATUS_SUCCESS);
    };
    self->queue.issue(std::move(op));
    return GGML_STATUS_SUCCESS;
}

static void backend_event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    std::lock_guard<std::mutex> lock(device_lock());
    const device_queue &        queue = instance_of(backend)->queue;
    device_event *              self  = event_of(event);
    self->point                       = queue.now();
    self->is_recorded                 = true;
    add_record(COUNTING_EVENT_RECORD, queue.id, std::to_string(self->number).c_str(), 0, 0);
}

static void backend_event_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    std::lock_guard<std::mutex> lock(device_lock());
    device_queue &              queue = instance_of(backend)->queue;
    const device_event *        self  = event_of(event);
    add_record(COUNTING_EVENT_WAIT, queue.id, std::to_string(self->number).c_str(), 0, 0);
    if (self->is_recorded) {
        queue.wait_for(self->point);
    }
}

static const ggml_backend_i backend_i = {
    /* .get_name                = */ backend_get_name,
    /* .free                    = */ backend_free,
    /* .set_tensor_async        = */ backend_set_tensor_async,
    /* .get_tensor_async        = */ backend_get_tensor_async,
    /* .set_tensor_2d_async     = */ backend_set_tensor_2d_async,
    /* .get_tensor_2d_async     = */ backend_get_tensor_2d_async,
    /* .cpy_tensor_async        = */ backend_cpy_tensor_async,
    /* .synchronize             = */ backend_synchronize,
    /* .graph_plan_create       = */ nullptr,
    /* .graph_plan_free         = */ nullptr,
    /* .graph_plan_update       = */ nullptr,
    /* .graph_plan_compute      = */ nullptr,
    /* .graph_compute           = */ backend_graph_compute,
    /* .event_record            = */ backend_event_record,
    /* .event_wait              = */ backend_event_wait,
    /* .graph_optimize          = */ nullptr,
};

static ggml_guid_t backend_guid() {
    static ggml_guid guid = { 0x63, 0x6f, 0x75, 0x6e, 0x74, 0x69, 0x6e, 0x67, 0x42, 0x1d, 0x90, 0x3c, 0x5e, 0xa7, 0x18, 0x01 };
    return &guid;
}

// device

static const char * device_get_name(ggml_backend_dev_t) {
    return device_name;
}

static const char * device_get_description(ggml_backend_dev_t) {
    return "counts what a GPU would be asked to do";
}

static void device_get_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    std::lock_guard<std::mutex> lock(device_lock());
    *total = (size_t) memory_bytes;
    *free  = (size_t) std::max<int64_t>(0, memory_bytes - current_settings().other_bytes - allocated_bytes());
}

static enum ggml_backend_dev_type device_get_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

static void device_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    props->name        = device_get_name(dev);
    props->description = device_get_description(dev);
    props->type        = device_get_type(dev);
    props->device_id   = nullptr;
    device_get_memory(dev, &props->memory_free, &props->memory_total);
    props->caps              = {};
    props->caps.async        = true;
    props->caps.host_buffer  = true;
    props->caps.events       = true;
    props->caps.mmap_support = true;
}

static ggml_backend_dev_t cpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

static ggml_backend_t device_init_backend(ggml_backend_dev_t dev, const char *) {
    ggml_backend_t cpu = ggml_backend_dev_init(cpu_device(), nullptr);
    if (cpu == nullptr) {
        return nullptr;
    }
    auto set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu_device()),
                                                                                "ggml_backend_set_n_threads");
    set(cpu, 1);
    std::lock_guard<std::mutex> lock(device_lock());
    auto * self = new instance{ {}, cpu };
    return new ggml_backend{ backend_guid(), backend_i, dev, self };
}

static ggml_backend_buffer_type_t device_get_buffer_type(ggml_backend_dev_t) {
    return device_buffer_type();
}

static ggml_backend_buffer_type_t device_get_host_buffer_type(ggml_backend_dev_t) {
    return pinned_buffer_type();
}

static bool device_supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_CUSTOM:
        case GGML_OP_MAP_CUSTOM1:
        case GGML_OP_MAP_CUSTOM2:
        case GGML_OP_MAP_CUSTOM3:
            return false; // functions of the host
        default:
            return ggml_backend_dev_supports_op(cpu_device(), op);
    }
}

static bool device_supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t buft) {
    return buft == device_buffer_type();
}

// a batch large enough that its weights are copied from host memory
static bool device_offload_op(ggml_backend_dev_t, const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_GET_ROWS:
            return false;
        case GGML_OP_MUL_MAT:
            return op->ne[1] >= offload_min_tokens;
        case GGML_OP_MUL_MAT_ID:
        case GGML_OP_ROPE:
        case GGML_OP_ROPE_BACK:
            return op->ne[2] >= offload_min_tokens;
        default:
            return ggml_nrows(op) >= offload_min_tokens;
    }
}

static ggml_backend_event_t device_event_new(ggml_backend_dev_t dev) {
    static std::atomic<int> last_number{ 0 };
    return new ggml_backend_event{ dev, new device_event{ ++last_number, false, {} } };
}

static void device_event_free(ggml_backend_dev_t, ggml_backend_event_t event) {
    delete event_of(event);
    delete event;
}

static void device_event_synchronize(ggml_backend_dev_t, ggml_backend_event_t event) {
    std::lock_guard<std::mutex> lock(device_lock());
    const device_event *        self       = event_of(event);
    const bool                  has_waited = !device_queue::is_finished(self->point);
    const int                   n_graphs   = device_queue::finish(self->point);
    add_record(COUNTING_EVENT_SYNC, 0, std::to_string(self->number).c_str(), 0, wait_flags(has_waited, n_graphs));
}

static const ggml_backend_device_i device_i = {
    /* .get_name             = */ device_get_name,
    /* .get_description      = */ device_get_description,
    /* .get_memory           = */ device_get_memory,
    /* .get_type             = */ device_get_type,
    /* .get_props            = */ device_get_props,
    /* .init_backend         = */ device_init_backend,
    /* .get_buffer_type      = */ device_get_buffer_type,
    /* .get_host_buffer_type = */ device_get_host_buffer_type,
    /* .buffer_from_host_ptr = */ nullptr,
    /* .supports_op          = */ device_supports_op,
    /* .supports_buft        = */ device_supports_buft,
    /* .offload_op           = */ device_offload_op,
    /* .event_new            = */ device_event_new,
    /* .event_free           = */ device_event_free,
    /* .event_synchronize    = */ device_event_synchronize,
};

// registry

static const char * reg_get_name(ggml_backend_reg_t) {
    return "COUNTING";
}

static size_t reg_get_device_count(ggml_backend_reg_t) {
    return 1;
}

static ggml_backend_dev_t reg_get_device(ggml_backend_reg_t, size_t) {
    return the_device();
}

static bool register_host_buffer(void *, size_t) {
    return true; // the device reads any memory of the host
}

static void unregister_host_buffer(void *) {}

static void * reg_get_proc_address(ggml_backend_reg_t, const char * name) {
    if (std::strcmp(name, "ggml_backend_register_host_buffer") == 0) {
        return (void *) register_host_buffer;
    }
    return std::strcmp(name, "ggml_backend_unregister_host_buffer") == 0 ? (void *) unregister_host_buffer : nullptr;
}

static ggml_backend_reg_t the_registry() {
    static ggml_backend_reg registry = {
        /* .api_version = */ GGML_BACKEND_API_VERSION,
        /* .iface       = */ { reg_get_name, reg_get_device_count, reg_get_device, reg_get_proc_address },
        /* .context     = */ nullptr,
    };
    return &registry;
}

ggml_backend_dev_t the_device() {
    static ggml_backend_device device = { device_i, the_registry(), nullptr };
    return &device;
}

} // namespace counting

extern "C" COUNTING_API ggml_backend_reg_t ggml_backend_init() {
    return counting::the_registry();
}
