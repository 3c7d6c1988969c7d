// A CUDA device that is none, registered under DeviceType::CUDA of a torch that was built for the CPU alone; or one of another maker, under
// PrivateUse1. tests/device/README.md says what it is for; fake_cuda/torch_cuda.py and fake_cuda/torch_npu.py put torch's modules on top.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>

#include "graphs.h"
#include "operations.h"
#include "process_group.h"

namespace fake_cuda {
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DEVICE_TYPE;
  Guard() = default;
  explicit Guard(DeviceType) {}
  static DeviceIndex index(Device device) { return device.has_index() ? device.index() : current_device; }
  static c10::Stream wrap(DeviceIndex device, StreamId id) { return c10::Stream(c10::Stream::UNSAFE, Device(DEVICE_TYPE, device), id); }
  static EventPtr& event(void* event) { return *static_cast<EventPtr*>(event); }

  DeviceType type() const override { return DEVICE_TYPE; }
  DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  Device getDevice() const override { return {DEVICE_TYPE, current_device}; }
  void setDevice(Device device) const override {
    check_device(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(Device device) const override { return wrap(index(device), current_ids[index(device)]); }
  c10::Stream getDefaultStream(Device device) const override { return wrap(index(device), 0); }
  c10::Stream getNewStream(Device device, int) const override { return wrap(index(device), take_from_pool(index(device))); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return wrap(stream.device_index(), std::exchange(current_ids[stream.device_index()], stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override {
    forbid_in_capture("cudaStreamQuery");
    return stream_of(stream).is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream_of(stream), "Stream.synchronize"); }
  bool isStreamCapturing(const c10::Stream& stream) const override { return bool(capture_of(stream_of(stream))); }
  void synchronizeDevice(const DeviceIndex device) const override {
    forbid_in_capture("torch.cuda.synchronize");
    note_sync("torch.cuda.synchronize");
    for (auto* stream : streams_of(device)) stream->wait();
    fill_free_blocks(device);
    raise_error_of_device();
  }

  void destroyEvent(void* made, const DeviceIndex) const noexcept override { delete static_cast<EventPtr*>(made); }
  void record(void** made, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*made) *made = new EventPtr;
    event(*made) = record_event(stream_of(stream));
  }
  void block(void* made, const c10::Stream& stream) const override {
    if (made && event(made)) block_stream(stream_of(stream), event(made));
  }
  bool queryEvent(void* made) const override { return !made || query_event(event(made)); }
  void synchronizeEvent(void* made) const override {
    forbid_in_capture("Event.synchronize");
    note_sync("Event.synchronize");
    if (made && event(made)) event(made)->wait();
    raise_error_of_device();
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    TORCH_CHECK(start && end && event(start)->query() && event(end)->query(), "CUDA error: device not ready");
    return std::chrono::duration<double, std::milli>(event(end)->time - event(start)->time).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override { record_stream_on(data.get(), stream_of(stream)); }
};
C10_REGISTER_GUARD_IMPL(DEVICE_KEY, Guard);

// What every accelerator answers torch.
template <typename Interface>
struct CommonHooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  DeviceIndex getCurrentDevice() const override { return fake_cuda::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({DEVICE_TYPE, device}); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return Guard().exchangeDevice({DEVICE_TYPE, device}).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return device < 0 ? fake_cuda::current_device : exchangeDevice(device); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  Device getDeviceFromPtr(void* address) const override { return {DEVICE_TYPE, static_cast<DeviceIndex>(device_of(address))}; }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override { return at::make_generator<DeviceGenerator>(device < 0 ? fake_cuda::current_device : device); }
};

struct CudaHooks : CommonHooks<at::CUDAHooksInterface> {
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return NUM_DEVICES; }
  DeviceIndex current_device() const override { return fake_cuda::current_device; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator(); }
  void deviceSynchronize(DeviceIndex device) const override { Guard().synchronizeDevice(device); }
};

struct OtherHooks : CommonHooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage.unsafeGetStorageImpl(), bytes); }
};

// torch asked for its hooks of CUDA while it was imported and keeps the ones without it; these have the same size, so their table is put in its place.
void register_hooks() {
  if (DEVICE_TYPE == DeviceType::PrivateUse1) return at::RegisterPrivateUse1HooksInterface(new OtherHooks);
  static_assert(sizeof(CudaHooks) == sizeof(at::CUDAHooksInterface));
  auto& hooks = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  TORCH_CHECK(!hooks.hasCUDA(), "this torch was built with CUDA: fake_cuda is for builds without");
  *reinterpret_cast<void**>(&hooks) = *reinterpret_cast<void**>(new CudaHooks);
}

std::map<std::string, int64_t> counts() {
  auto& c = controls();
  std::map<std::string, int64_t> found{{"launches", c.num_launches}, {"copies_to_device", c.num_to_device}, {"bytes_to_device", c.bytes_to_device}, {"copies_to_host", c.num_to_host}, {"bytes_to_host", c.bytes_to_host}};
  {
    std::lock_guard lock(memory().mutex);
    auto& m = memory();
    found["blocks"] = m.live.size();
    found["blocks_reused"] = m.num_reused;
    found["bytes"] = m.live_bytes[0] + m.live_bytes[1];
    found["allocations"] = m.num_allocations[0] + m.num_allocations[1];
  }
  {
    std::lock_guard lock(pinned().mutex);
    auto& p = pinned();
    found["pinned_requests"] = p.num_requests;
    found["pinned_allocations"] = p.num_allocations;
    found["pinned_bytes"] = p.bytes;
    found["pinned_live_bytes"] = p.live_bytes;
  }
  std::lock_guard lock(streams().mutex);
  found["pool_streams"] = streams().num_taken[0] + streams().num_taken[1];
  found["external_streams"] = streams().num_external;
  return found;
}

std::map<std::string, int64_t> memory_of(DeviceIndex device) {
  std::lock_guard lock(memory().mutex);
  auto& m = memory();
  return {{"current", m.live_bytes[device]}, {"peak", m.peak_bytes[device]}, {"reserved", m.reserved_bytes[device]}, {"allocations", m.num_allocations[device]}};
}

void set_gate(bool is_open, Stream* stream) {
  auto& c = controls();
  {
    std::lock_guard lock(c.mutex);
    if (!stream) {
      c.is_open = is_open;
    } else if (is_open) {
      c.closed.erase(stream);
    } else {
      c.closed.insert(stream);
    }
  }
  c.gates_changed.notify_all();
}

void enqueue(const std::string& name, py::function function) {
  auto drop = [](py::function* held) {
    py::gil_scoped_acquire gil;
    delete held;
  };
  auto held = std::shared_ptr<py::function>(new py::function(std::move(function)), drop);
  push(current_stream(current_device), name, [held] {
    py::gil_scoped_acquire gil;
    (*held)();
  });
}
}  // namespace fake_cuda

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace fake_cuda;
  c10::SetAllocator(DEVICE_TYPE, &device_allocator());
  register_hooks();
  using Unlocked = py::call_guard<py::gil_scoped_release>;

  m.def("set_gate", [](bool is_open) { set_gate(is_open, nullptr); });
  m.def("set_stream_gate", [](DeviceIndex device, StreamId id, bool is_open) { set_gate(is_open, &stream_of(device, id)); });
  m.def("set_delay_us", [](int64_t delay) { controls().delay_us = delay; });
  m.def("counts", &counts);
  m.def("take_syncs", [] {
    std::lock_guard lock(controls().mutex);
    return std::exchange(controls().syncs, {});
  });
  m.def("log_launches", [](bool is_on) {
    std::lock_guard lock(controls().mutex);
    controls().is_logging_launches = is_on;
    return std::exchange(controls().launches, {});
  });
  m.def("num_waiting", [](DeviceIndex device, StreamId id) { return stream_of(device, id).num_waiting(); });
  m.def("drain", [] {  // as a synchronisation that nobody counts
    for (DeviceIndex device = 0; device < NUM_DEVICES; device++)
      for (auto* stream : streams_of(device)) stream->wait();
    for (DeviceIndex device = 0; device < NUM_DEVICES; device++) fill_free_blocks(device);
    raise_error_of_device();
  }, Unlocked());
  m.def("stop", &stop, Unlocked());
  m.def("set_float64", [](bool has) { controls().has_float64 = has; });
  m.def("limit_memory", [](size_t bytes) { memory().limit_bytes = bytes; });

  m.def("get_device", [] { return current_device; });
  m.def("exchange_device", [](DeviceIndex device) {
    if (device < 0) return int(-1);
    check_device(device);
    return int(std::exchange(current_device, device));
  });
  m.def("get_stream", [](DeviceIndex device) { return current_ids[device < 0 ? current_device : device]; });
  m.def("set_stream", [](DeviceIndex device, StreamId id) { current_ids[device] = id; current_device = device; });
  m.def("make_external", &make_external);
  m.def("take_from_pool", &take_from_pool);
  m.def("synchronize", [] { Guard().synchronizeDevice(current_device); }, Unlocked());
  m.def("sleep", [](int64_t cycles) {  // of a clock of 1 GHz
    push(current_stream(current_device), "sleep", [cycles] { std::this_thread::sleep_for(std::chrono::nanoseconds(cycles)); });
  });
  m.def("elapsed_ms", [](int64_t start, int64_t end) { return Guard().elapsedTime(reinterpret_cast<void*>(start), reinterpret_cast<void*>(end), 0); });
  m.def("memory_of", &memory_of);
  m.def("reset_peak", [](DeviceIndex device) {
    std::lock_guard lock(memory().mutex);
    memory().peak_bytes[device] = memory().live_bytes[device];
  });
  m.def("set_sync_debug_mode", [](int mode) { controls().sync_debug_mode = mode; });
  m.def("get_sync_debug_mode", [] { return controls().sync_debug_mode.load(); });
  m.def("is_capturing", [] { return bool(capture_of(current_stream(current_device))); });
  m.def("next_pool", [] { return std::pair<uint64_t, uint64_t>{0, Graph::next_id()}; });
  m.def("register_host", [](int64_t at, size_t bytes) { std::lock_guard lock(pinned().mutex); pinned().registered[reinterpret_cast<char*>(at)] = bytes; });
  m.def("unregister_host", [](int64_t at) { std::lock_guard lock(pinned().mutex); pinned().registered.erase(reinterpret_cast<char*>(at)); });
  m.def("default_generators", [] {
    py::tuple all(NUM_DEVICES);
    for (DeviceIndex i = 0; i < NUM_DEVICES; i++) all[i] = py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_generator(i)));
    return all;
  });
  m.def("resize_storage", [](const at::Tensor& bytes, size_t size) { resize_storage(bytes.storage().unsafeGetStorageImpl(), size); });

  m.def("enqueue", &enqueue);
  m.def("seen_by_streams", [](const at::Tensor& tensor) { return seen_by_streams(place_of(tensor)); });
  m.def("arenas", [] {  // of each device in use: first address, bytes, what to add for the shadow
    std::vector<std::tuple<uint64_t, uint64_t, int64_t>> found;
    for (auto& arena : memory().arenas)
      if (arena.base) found.emplace_back(reinterpret_cast<uint64_t>(arena.base), ARENA_BYTES, arena.shadow - arena.base);
    return found;
  });

  py::class_<Graph>(m, "Graph")
      .def(py::init<bool>(), py::arg("keep_graph") = false)
      .def("capture_begin", &Graph::begin, py::arg("pool") = std::nullopt, py::arg("capture_error_mode") = "global")
      .def("capture_end", &Graph::end)
      .def("instantiate", [](Graph&) {})
      .def("replay", &Graph::replay)
      .def("reset", &Graph::reset)
      .def("pool", &Graph::pool)
      .def("enable_debug_mode", [](Graph&) {})
      .def("debug_dump", [](Graph&, const std::string&) {})
      .def("node_names", &Graph::node_names);
  bind_process_group(m);
}
