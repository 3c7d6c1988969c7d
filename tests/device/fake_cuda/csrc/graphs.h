// CUDA graphs: what a capturing stream is given becomes a node; a replay queues every node on the current stream, in the order of capture.
#pragma once
#include "generators.h"

namespace fake_cuda {
struct Graph {
  explicit Graph(bool) {}

  void begin(std::optional<std::pair<uint64_t, uint64_t>> pool, const std::string& mode) {
    auto& stream = current_stream(current_device);
    TORCH_CHECK(stream.id != 0, "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them on the default stream.)");
    TORCH_CHECK(!nodes_, "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance.");
    std::lock_guard lock(captures_mutex());
    TORCH_CHECK(!stream.capture, "CUDA error: operation not permitted when stream is capturing (cudaStreamBeginCapture)");
    capture_ = std::make_shared<Capture>();
    capture_->id = next_id();
    capture_->pool = pool ? pool->second : next_id();
    capture_->mode = mode;
    capture_->thread = std::this_thread::get_id();
    capture_->origin = &stream;
    capture_->seen[&stream];
    stream.capture = capture_;
    captures().insert(capture_);
  }

  void end() {
    auto& stream = current_stream(current_device);
    std::lock_guard lock(captures_mutex());
    TORCH_CHECK(capture_ && stream.capture == capture_ && capture_->origin == &stream, "Capture must end on the same stream it began on.");
    for (auto& [joined, seen] : capture_->seen)
      if (joined->capture == capture_) joined->capture = nullptr;
    captures().erase(capture_);
    capture_->has_ended = true;
    TORCH_CHECK(capture_->invalid.empty(), "CUDA error: operation failed due to a previous error during capture (", capture_->invalid, ")");
    auto& joined = capture_->seen[&stream];
    for (auto& [other, last] : capture_->last)
      TORCH_CHECK(other == &stream || joined[other] >= last, "CUDA error: capturing stream has unjoined work");
    nodes_ = capture_;
  }

  void replay() {
    TORCH_CHECK(nodes_, "Called CUDAGraph::replay without a preceding successful capture.");
    auto starts = std::make_shared<Starts>();
    for (auto& [generator, count] : nodes_->drawn) {
      auto* impl = static_cast<DeviceGenerator*>(generator);
      (*starts)[generator] = {impl->seed_, impl->offset_};
      impl->offset_ += count;
    }
    auto& stream = current_stream(current_device);
    for (size_t i = 0; i < nodes_->nodes.size(); i++)
      push(stream, nodes_->nodes[i].name, [nodes = nodes_, starts, i] {
        replay_starts = starts.get();
        nodes->nodes[i].run();
        replay_starts = nullptr;
      });
  }

  void reset() { nodes_ = capture_ = nullptr; }
  std::pair<uint64_t, uint64_t> pool() const {
    TORCH_CHECK(capture_, "Called CUDAGraph::pool() without a preceding capture.");
    return {0, capture_->pool};
  }
  std::vector<std::string> node_names() const {
    std::vector<std::string> names;
    if (nodes_)
      for (auto& node : nodes_->nodes) names.push_back(node.name);
    return names;
  }
  static uint64_t next_id() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }

 private:
  std::shared_ptr<Capture> capture_, nodes_;
};
}  // namespace fake_cuda
