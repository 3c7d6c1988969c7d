// Random numbers as CUDA draws them: a generator is a seed and an offset. A call takes the next offsets when it is queued and draws when it
// runs, so the state that the host sees does not depend on how far the device is. A graph takes its offsets at each replay.
#pragma once
#include <ATen/CPUGeneratorImpl.h>

#include <random>

#include "streams.h"

namespace fake_cuda {
constexpr uint64_t OFFSETS_PER_CALL = 4;
constexpr int64_t STATE_BYTES = 16;

struct DeviceGenerator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;

  explicit DeviceGenerator(DeviceIndex device)
      : c10::GeneratorImpl(Device(DEVICE_TYPE, device), c10::DispatchKeySet(c10::DispatchKey::DEVICE_KEY)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(std::random_device{}());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == STATE_BYTES && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(), "RNG state must be 16 bytes");
    auto* bytes = static_cast<const char*>(state.data());
    memcpy(&seed_, bytes, 8);
    memcpy(&offset_, bytes + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({STATE_BYTES}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    memcpy(state.mutable_data_ptr(), &seed_, 8);
    memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
};

inline const at::Generator& default_generator(DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (DeviceIndex i = 0; i < NUM_DEVICES; i++) made->push_back(at::make_generator<DeviceGenerator>(i));
    return made;
  }();
  return all->at(device < 0 ? current_device : device);
}

// Where each generator stood when the graph that runs in this thread was replayed.
using Starts = std::map<void*, std::pair<uint64_t, uint64_t>>;
inline thread_local const Starts* replay_starts = nullptr;

struct Draw {
  at::Generator generator;
  uint64_t seed, offset;
  bool is_captured;

  // The generator that the operation is given when it runs.
  at::Generator make() const {
    uint64_t from = seed, at = offset;
    if (is_captured && replay_starts) {
      auto& [start_seed, start] = replay_starts->at(generator.unsafeGetGeneratorImpl());
      from = start_seed;
      at += start;
    }
    return at::make_generator<at::CPUGeneratorImpl>(from * 0x9E3779B97F4A7C15ull + at);
  }
};
inline Draw take(const at::Generator& generator, Stream& stream) {
  auto* impl = static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
  {
    std::lock_guard lock(captures_mutex());
    if (stream.capture) {
      auto& drawn = stream.capture->drawn[impl];
      return {generator, impl->seed_, std::exchange(drawn, drawn + OFFSETS_PER_CALL), true};
    }
  }
  std::lock_guard lock(impl->mutex_);
  return {generator, impl->seed_, std::exchange(impl->offset_, impl->offset_ + OFFSETS_PER_CALL), false};
}
}  // namespace fake_cuda
