// Streams and events: a stream is a thread that runs what was queued, in order, later.
//
//     host      push ─▶ push ─▶ record ─▶ …            returns at once
//     stream            run ──▶ run ──▶ event is done   as long as its gate is open, after the delay
//
// Threads start with the first work of their stream, so a process that forks before it uses the device is safe. Nothing here is ever
// destroyed: threads outlive static destructors.
#pragma once
#include <torch/extension.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

// What all of this is registered as: CUDA, or PrivateUse1, which torch keeps for the makers of other accelerators.
#ifndef DEVICE_KEY
#define DEVICE_KEY CUDA
#endif

namespace fake_cuda {
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::StreamId;
using Clock = std::chrono::steady_clock;
using Function = std::function<void()>;

constexpr DeviceType DEVICE_TYPE = DeviceType::DEVICE_KEY;
constexpr int NUM_DEVICES = 2;
constexpr int POOL_SIZE = 32;
constexpr StreamId FIRST_EXTERNAL = 1 << 20;

struct Capture;
struct Stream;

// The interpreter's lock, if this thread has it, is let go of while the host waits: kernels in Triton's interpreter need it.
struct WithoutGil {
  PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() {
    if (state) PyEval_RestoreThread(state);
  }
};

// ---- what tests steer and count

struct Controls {
  std::mutex mutex;
  std::condition_variable gates_changed;
  bool is_open = true;        // the gate of the whole device
  std::set<Stream*> closed;   // gates of single streams
  bool is_stopping = false;   // the process ends
  std::atomic<int64_t> delay_us{0};
  std::atomic<int64_t> num_launches{0};
  std::atomic<int> num_running{0};
  std::atomic<int> sync_debug_mode{0};
  bool has_float64 = true;    // some devices have none
  std::atomic<int64_t> num_to_device{0}, bytes_to_device{0}, num_to_host{0}, bytes_to_host{0};
  std::vector<std::string> syncs;
  std::vector<std::string> launches;
  bool is_logging_launches = false;
  std::string error;          // the first that an operation raised; told at the next synchronisation, as CUDA does
};
inline Controls& controls() {
  static auto* made = new Controls;
  return *made;
}

inline void note_sync(const std::string& what) {
  auto& c = controls();
  {
    std::lock_guard lock(c.mutex);
    c.syncs.push_back(what);
  }
  TORCH_CHECK(c.sync_debug_mode != 2, "called a synchronizing CUDA operation (", what, ")");
  if (c.sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation (", what, ")");
}

// The process ends: what runs may finish, for a while; what is queued never begins.
inline void stop() {
  auto& c = controls();
  {
    std::lock_guard lock(c.mutex);
    c.is_stopping = true;
  }
  // Also autograd's threads, which let go of Python objects after the host was told that backward is done: too late, they abort the process.
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  for (int i = 0; i < 200 && c.num_running > 0; i++) std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

inline void raise_error_of_device() {
  auto& c = controls();
  std::lock_guard lock(c.mutex);
  TORCH_CHECK(c.error.empty(), "CUDA error: ", std::exchange(c.error, ""));
}

// ---- streams

struct Work {
  std::string name;
  Function run;
};

struct Stream {
  const DeviceIndex device;
  const StreamId id;
  std::shared_ptr<Capture> capture;  // the graph that work goes to instead of the thread; guarded by captures_mutex()

  Stream(DeviceIndex device, StreamId id) : device(device), id(id) {}

  void queue(Work work) {
    std::lock_guard lock(mutex_);
    if (!has_thread_) {
      has_thread_ = true;
      std::thread([this] { work_off(); }).detach();
    }
    waiting_.push_back(std::move(work));
    num_queued_++;
    changed_.notify_all();
  }
  void wait() {
    WithoutGil released;
    std::unique_lock lock(mutex_);
    auto last = num_queued_;
    changed_.wait(lock, [&] { return num_done_ >= last; });
  }
  bool is_idle() {
    std::lock_guard lock(mutex_);
    return num_done_ == num_queued_;
  }
  int64_t num_waiting() {
    std::lock_guard lock(mutex_);
    return num_queued_ - num_done_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> waiting_;
  int64_t num_queued_ = 0, num_done_ = 0;
  bool has_thread_ = false;

  void work_off() {
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    at::NoGradGuard no_grad;
    for (;;) {
      Work work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !waiting_.empty(); });
        work = std::move(waiting_.front());
        waiting_.pop_front();
      }
      pass_gate();
      run(work);
      work.run = nullptr;  // what it kept is let go of before anybody is told that it is done
      controls().num_running--;
      {
        std::lock_guard lock(mutex_);
        num_done_++;
      }
      changed_.notify_all();
    }
  }
  void pass_gate() {
    auto& c = controls();
    {
      std::unique_lock lock(c.mutex);
      c.gates_changed.wait(lock, [&] { return c.is_open && !c.closed.count(this) && !c.is_stopping; });
      c.num_running++;
    }
    if (auto delay = c.delay_us.load()) std::this_thread::sleep_for(std::chrono::microseconds(delay));
  }
  static void run(Work& work) {
    try {
      work.run();
    } catch (const std::exception& error) {
      auto& c = controls();
      std::lock_guard lock(c.mutex);
      if (c.error.empty()) c.error = work.name + ": " + error.what();
    }
  }
};

struct Streams {
  std::mutex mutex;
  std::map<std::pair<DeviceIndex, StreamId>, Stream*> made;
  int64_t num_taken[NUM_DEVICES] = {};     // from the pool
  int64_t num_external = 0;
};
inline Streams& streams() {
  static auto* all = new Streams;
  return *all;
}

inline Stream& stream_of(DeviceIndex device, StreamId id) {
  std::lock_guard lock(streams().mutex);
  auto& found = streams().made[{device, id}];
  if (!found) found = new Stream(device, id);
  return *found;
}
inline Stream& stream_of(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }

inline std::vector<Stream*> streams_of(DeviceIndex device) {
  std::lock_guard lock(streams().mutex);
  std::vector<Stream*> found;
  for (auto& [key, stream] : streams().made)
    if (key.first == device) found.push_back(stream);
  return found;
}

// Streams come round-robin from a pool, as torch's do: the 33rd is the first again.
inline StreamId take_from_pool(DeviceIndex device) {
  std::lock_guard lock(streams().mutex);
  return 1 + streams().num_taken[device]++ % POOL_SIZE;
}
inline StreamId make_external() {
  std::lock_guard lock(streams().mutex);
  return FIRST_EXTERNAL + streams().num_external++;
}

inline bool is_ours(Device device) { return device.type() == DEVICE_TYPE; }
inline thread_local DeviceIndex current_device = 0;
inline thread_local StreamId current_ids[NUM_DEVICES] = {};
inline Stream& current_stream(DeviceIndex device) { return stream_of(device, current_ids[device]); }

inline void check_device(int64_t device) {
  TORCH_CHECK(device >= 0 && device < NUM_DEVICES, "CUDA error: invalid device ordinal (", device, ")");
}

// ---- captures: which streams belong to a graph that is being captured; graphs.h has the rest

struct Capture {
  uint64_t id = 0;
  uint64_t pool = 0;
  std::string mode;                                 // global, thread_local, relaxed
  std::thread::id thread;
  Stream* origin = nullptr;
  std::vector<Work> nodes;                          // in the order of the host's calls: one order that every dependency allows
  std::map<Stream*, size_t> last;                   // each stream's newest node
  std::map<Stream*, std::map<Stream*, size_t>> seen;  // what each stream has waited for
  std::string invalid;                              // why the capture failed
  std::map<void*, uint64_t> drawn;                  // random numbers that one replay takes from each generator
  bool has_ended = false;
};
inline std::mutex& captures_mutex() {
  static auto* made = new std::mutex;
  return *made;
}
inline std::set<std::shared_ptr<Capture>>& captures() {
  static auto* all = new std::set<std::shared_ptr<Capture>>;
  return *all;
}
inline std::shared_ptr<Capture> capture_of(Stream& stream) {
  std::lock_guard lock(captures_mutex());
  return stream.capture;
}

// What CUDA refuses while a graph is being captured: in mode global from any thread, in thread_local from the capturing one.
inline void forbid_in_capture(const std::string& what) {
  std::lock_guard lock(captures_mutex());
  for (auto& capture : captures()) {
    bool is_concerned =
        capture->mode == "global" || (capture->mode == "thread_local" && capture->thread == std::this_thread::get_id());
    if (!is_concerned) continue;
    capture->invalid = what;
    TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing (", what, ")");
  }
}

// Work for a stream, or a node of the graph that it is captured into.
inline void push(Stream& stream, std::string name, Function run) {
  auto& c = controls();
  c.num_launches++;
  if (c.is_logging_launches) {
    std::lock_guard lock(c.mutex);
    c.launches.push_back(name);
  }
  {
    std::lock_guard lock(captures_mutex());
    if (auto& capture = stream.capture) {
      capture->nodes.push_back({std::move(name), std::move(run)});
      capture->last[&stream] = capture->seen[&stream][&stream] = capture->nodes.size();
      return;
    }
  }
  stream.queue({std::move(name), std::move(run)});
}

// The host waits for a stream; `what` is counted.
inline void synchronize(Stream& stream, const std::string& what) {
  forbid_in_capture(what);
  note_sync(what);
  stream.wait();
  raise_error_of_device();
}

// ---- events

struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_done = false;
  Clock::time_point time;
  std::shared_ptr<Capture> capture;        // recorded into a graph
  std::map<Stream*, size_t> seen;

  void finish() {
    {
      std::lock_guard lock(mutex);
      is_done = true;
      time = Clock::now();
    }
    changed.notify_all();
  }
  bool query() {
    std::lock_guard lock(mutex);
    return is_done;
  }
  void wait() {
    WithoutGil released;
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return is_done; });
  }
};
using EventPtr = std::shared_ptr<EventState>;

inline EventPtr record_event(Stream& stream) {
  auto event = std::make_shared<EventState>();
  {
    std::lock_guard lock(captures_mutex());
    if (stream.capture) {
      event->capture = stream.capture;
      event->seen = stream.capture->seen[&stream];
      return event;
    }
  }
  stream.queue({"event", [event] { event->finish(); }});
  return event;
}

// The stream waits, the host does not. A stream that waits for an event of a capture joins the capture.
inline void block_stream(Stream& stream, const EventPtr& event) {
  {
    std::lock_guard lock(captures_mutex());
    if (event->capture) {
      TORCH_CHECK(!event->capture->has_ended, "CUDA error: operation not permitted on an event last recorded in a capturing stream");
      if (!stream.capture) stream.capture = event->capture;
      TORCH_CHECK(stream.capture == event->capture, "CUDA error: operation would result in a merge of separate capture sequences");
      auto& seen = stream.capture->seen[&stream];
      for (auto& [other, index] : event->seen) seen[other] = std::max(seen[other], index);
      return;
    }
    if (stream.capture) {
      stream.capture->invalid = "dependency created on uncaptured work in another stream";
      TORCH_CHECK(false, "CUDA error: dependency created on uncaptured work in another stream");
    }
  }
  stream.queue({"wait", [event] { event->wait(); }});
}

inline bool query_event(const EventPtr& event) {
  if (!event) return true;
  TORCH_CHECK(!event->capture, "CUDA error: operation not permitted on an event last recorded in a capturing stream");
  forbid_in_capture("cudaEventQuery");
  return event->query();
}
}  // namespace fake_cuda
