// Memory: the host sees each page of a device as PROT_NONE (a host access is a crash); work on streams uses a second mapping of the same pages.
//
//     device address 0x7f..  ── PROT_NONE ──┐
//                                           ├── the same pages
//     shadow address         ── readable ───┘
//
// Blocks are cached as torch's allocator does it: a freed block is reused at once by its stream; one that other streams were recorded on
// waits for their events. Blocks are filled with 0xFF, in stream order when they are taken again, and at a synchronisation of the device: whoever
// still reads them sees NaN. Not when they are freed: FSDP frees gradients of one stream while the optimizer on another has yet to read them,
// and makes the first wait before it takes memory again, which is all that CUDA asks for.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include "streams.h"

namespace fake_cuda {
constexpr size_t ARENA_BYTES = size_t(32) << 30;  // addresses; pages come with their first use
constexpr size_t WHOLE_FILL_BYTES = size_t(64) << 20;
constexpr size_t EDGE_BYTES = size_t(1) << 20;

struct Arena {
  char* base = nullptr;
  char* shadow = nullptr;
  size_t top = 0;

  void map() {
    int file = memfd_create("fake_cuda", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, ARENA_BYTES) == 0, "fake_cuda: no memory file");
    auto map = [&](int protection) {
      void* at = mmap(nullptr, ARENA_BYTES, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(at != MAP_FAILED, "fake_cuda: mmap failed");
      return static_cast<char*>(at);
    };
    shadow = map(PROT_READ | PROT_WRITE);
    base = map(PROT_NONE);
    close(file);
  }
};

struct Block {
  DeviceIndex device;
  size_t at, bytes, requested;
  StreamId stream;
  uint64_t pool;  // of a graph; 0: everybody's
  std::set<Stream*> used_by;
};

struct Memory {
  std::mutex mutex;
  Arena arenas[NUM_DEVICES];
  std::map<void*, Block> live;
  std::map<std::tuple<DeviceIndex, StreamId, uint64_t, size_t>, std::vector<size_t>> free;
  std::map<size_t, size_t> unfilled[NUM_DEVICES];  // free blocks with what was in them
  std::vector<std::pair<Block, std::vector<EventPtr>>> pending;
  int64_t live_bytes[NUM_DEVICES] = {}, peak_bytes[NUM_DEVICES] = {}, reserved_bytes[NUM_DEVICES] = {};
  int64_t num_allocations[NUM_DEVICES] = {}, num_reused = 0;
  size_t limit_bytes = ARENA_BYTES;
};
inline Memory& memory() {
  static auto* made = new Memory;
  return *made;
}

// Mapped at first use: a process that was forked before has pages of its own.
inline Arena& arena(DeviceIndex device) {
  auto& found = memory().arenas[device];
  if (!found.base) found.map();
  return found;
}

inline int device_of(const void* address) {
  auto* at = static_cast<const char*>(address);
  for (int device = 0; device < NUM_DEVICES; device++) {
    auto* base = memory().arenas[device].base;
    if (base && at >= base && at < base + ARENA_BYTES) return device;
  }
  return -1;
}
inline void* shadow(void* address) {
  int device = device_of(address);
  if (device < 0) return address;
  auto& found = memory().arenas[device];
  return found.shadow + (static_cast<char*>(address) - found.base);
}

inline void fill_with_nan(char* begin, size_t bytes) {
  if (bytes <= WHOLE_FILL_BYTES) {
    memset(begin, 0xFF, bytes);
  } else {
    memset(begin, 0xFF, EDGE_BYTES);
    memset(begin + bytes - EDGE_BYTES, 0xFF, EDGE_BYTES);
  }
}

inline void give_back(const Block& block) {  // with the lock
  memory().unfilled[block.device][block.at] = block.bytes;
  memory().free[{block.device, block.stream, block.pool, block.bytes}].push_back(block.at);
}

// A block that is taken again is filled in the order of its stream, and in a graph by the graph.
inline void fill_again(Stream& stream, size_t at, size_t bytes, uint64_t pool) {  // with the lock
  if (!memory().unfilled[stream.device].erase(at)) return;
  auto fill = [begin = memory().arenas[stream.device].shadow + at, bytes] { fill_with_nan(begin, bytes); };
  if (pool) {
    push(stream, "fill", fill);
    controls().num_launches--;
  } else {
    stream.queue({"fill", fill});
  }
}

// While nothing runs: all that is free.
inline void fill_free_blocks(DeviceIndex device) {
  std::lock_guard lock(memory().mutex);
  for (auto* stream : streams_of(device))
    if (!stream->is_idle()) return;
  for (auto& [at, bytes] : std::exchange(memory().unfilled[device], {})) fill_with_nan(memory().arenas[device].shadow + at, bytes);
}

inline void release(void* address) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  auto found = m.live.find(address);
  if (found == m.live.end()) return;
  Block block = found->second;
  m.live.erase(found);
  m.live_bytes[block.device] -= block.bytes;
  if (block.used_by.empty()) return give_back(block);
  std::vector<EventPtr> events;
  for (auto* stream : block.used_by) events.push_back(record_event(*stream));
  m.pending.emplace_back(block, events);
}

inline void collect_pending() {  // with the lock
  auto& pending = memory().pending;
  for (size_t i = 0; i < pending.size();) {
    bool is_done = true;
    for (auto& event : pending[i].second) is_done &= event->query();
    if (!is_done) {
      i++;
      continue;
    }
    give_back(pending[i].first);
    pending.erase(pending.begin() + i);
  }
}

inline at::DataPtr allocate_on(DeviceIndex device, size_t requested) {
  Device where(DEVICE_TYPE, device);
  if (!requested) return {nullptr, nullptr, &release, where};
  auto& m = memory();
  size_t bytes = (requested + 511) / 512 * 512;
  auto& stream = current_stream(device);
  auto capture = capture_of(stream);
  uint64_t pool = capture ? capture->pool : 0;
  std::lock_guard lock(m.mutex);
  auto& home = arena(device);
  collect_pending();
  auto& free = m.free[{device, stream.id, pool, bytes}];
  size_t at;
  if (!free.empty()) {
    at = free.back();
    free.pop_back();
    m.num_reused++;
    fill_again(stream, at, bytes, pool);
  } else {
    TORCH_CHECK_WITH(OutOfMemoryError, home.top + bytes <= m.limit_bytes, "CUDA out of memory. Tried to allocate ", bytes, " bytes.");
    at = home.top;
    home.top += bytes;
    m.reserved_bytes[device] += bytes;
    if (bytes <= WHOLE_FILL_BYTES) fill_with_nan(home.shadow + at, bytes);  // now: nobody has used it yet
  }
  m.live_bytes[device] += bytes;
  m.peak_bytes[device] = std::max(m.peak_bytes[device], m.live_bytes[device]);
  m.num_allocations[device]++;
  void* address = home.base + at;
  m.live[address] = {device, at, bytes, requested, stream.id, pool, {}};
  return {address, address, &release, where};
}

inline void record_stream_on(void* address, Stream& stream) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  auto found = m.live.find(address);
  if (found != m.live.end() && (stream.id != found->second.stream || stream.device != found->second.device))
    found->second.used_by.insert(&stream);
}

struct DeviceAllocator final : c10::Allocator {
  at::DataPtr allocate(size_t bytes) override { return allocate_on(current_device, bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(shadow(to), shadow(const_cast<void*>(from)), bytes);
  }
};
inline DeviceAllocator& device_allocator() {
  static auto* made = new DeviceAllocator;
  return *made;
}

// ---- pinned memory: rounded to powers of two and cached, as torch's host allocator does it; freed memory holds 0xFF

struct Pinned {
  std::mutex mutex;
  std::map<char*, size_t> ranges;                 // live and cached ones
  std::map<char*, size_t> registered;             // cudaHostRegister
  std::map<size_t, std::vector<char*>> free;
  int64_t num_requests = 0, num_allocations = 0, bytes = 0, live_bytes = 0;
};
inline Pinned& pinned() {
  static auto* made = new Pinned;
  return *made;
}
inline bool covers(const std::map<char*, size_t>& ranges, const void* address) {
  auto* at = static_cast<char*>(const_cast<void*>(address));
  auto next = ranges.upper_bound(at);
  if (next == ranges.begin()) return false;
  --next;
  return at < next->first + next->second;
}
inline bool is_pinned(const void* address) {
  std::lock_guard lock(pinned().mutex);
  return covers(pinned().ranges, address) || covers(pinned().registered, address);
}
inline void release_pinned(void* address) {
  auto& p = pinned();
  std::lock_guard lock(p.mutex);
  auto* at = static_cast<char*>(address);
  size_t bytes = p.ranges[at];
  memset(at, 0xFF, bytes);
  p.live_bytes -= bytes;
  p.free[bytes].push_back(at);
}
struct PinnedAllocator final : c10::Allocator {
  at::DataPtr allocate(size_t requested) override {
    Device host(DeviceType::CPU);
    if (!requested) return {nullptr, nullptr, &release_pinned, host};
    forbid_in_capture("cudaHostAlloc");
    size_t bytes = 512;
    while (bytes < requested) bytes *= 2;
    auto& p = pinned();
    std::lock_guard lock(p.mutex);
    p.num_requests++;
    p.live_bytes += bytes;
    auto& free = p.free[bytes];
    char* at;
    if (!free.empty()) {
      at = free.back();
      free.pop_back();
    } else {
      at = static_cast<char*>(aligned_alloc(512, bytes));
      p.ranges[at] = bytes;
      p.num_allocations++;
      p.bytes += bytes;
    }
    return {at, at, &release_pinned, host};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
inline PinnedAllocator& pinned_allocator() {
  static auto* made = new PinnedAllocator;
  return *made;
}
}  // namespace fake_cuda
