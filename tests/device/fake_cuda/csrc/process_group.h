// A process group in stream order, over gloo: what NCCL's does, as far as streams can tell.
//
//     current stream   … backward ─┐ event                      ┌─ optimizer …
//     the group's own              └▶ gloo, on the shadow ─▶ event   wait(): the current stream waits, the host does not
//
// Each group has one stream a device, from the pool that everybody shares, as NCCL's do; collectives run in the order of the host's calls,
// which is how gloo matches them between ranks.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "operations.h"

namespace fake_cuda {
using Tensors = std::vector<at::Tensor>;
using Places = std::vector<Place>;

inline Places places_of(const Tensors& tensors) {
  Places found;
  for (auto& tensor : tensors) found.push_back(place_of(tensor));
  return found;
}
inline Tensors seen_by_streams(const Places& places) {
  Tensors found;
  for (auto& place : places) found.push_back(seen_by_streams(place));
  return found;
}

struct CollectiveWork final : c10d::Work {
  DeviceIndex device;
  EventPtr event;
  Tensors outputs;
  bool is_barrier;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  CollectiveWork(Stream& stream, Tensors outputs, bool is_barrier)
      : device(stream.device), event(record_event(stream)), outputs(std::move(outputs)), is_barrier(is_barrier) {
    future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<Device>{Device(DEVICE_TYPE, device)});
    auto before = std::exchange(current_ids[device], stream.id);  // the future's event belongs to the group's stream
    future->markCompleted(IValue(this->outputs));
    current_ids[device] = before;
  }
  bool isCompleted() override { return query_event(event); }
  bool isSuccess() const override { return event->query(); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (is_barrier) fake_cuda::synchronize(current_stream(device), "barrier");
    return true;
  }
  void synchronize() override { block_stream(current_stream(device), event); }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Gloo knows neither the mean nor a sum of products.
struct Reduction {
  c10d::ReduceOp op;
  double before = 1, after = 1;

  Reduction(const c10d::ReduceOp& given, int size) : op(given) {
    if (given.op_ == c10d::ReduceOp::AVG) {
      op = c10d::ReduceOp::SUM;
      after = size;
    } else if (given.op_ == c10d::ReduceOp::PREMUL_SUM) {
      auto* factor = static_cast<c10d::PreMulSumSupplement*>(given.supplement_.get());
      before = factor->tensor_factor.defined() ? factor->tensor_factor.item<double>() : factor->double_factor;
      op = c10d::ReduceOp::SUM;
    }
  }
  void run(const c10::intrusive_ptr<c10d::Backend>& gloo, Tensors tensors) const {
    if (before != 1)
      for (auto& tensor : tensors) tensor.mul_(before);
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    gloo->allreduce(tensors, options)->wait();
    if (after != 1)
      for (auto& tensor : tensors) tensor.div_(after);
  }
};

struct ProcessGroup final : c10d::Backend {
  using Gloo = c10::intrusive_ptr<c10d::Backend>;

  explicit ProcessGroup(Gloo gloo) : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return num_calls_; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {}
  WorkPtr endCoalescing() override { return c10::make_intrusive<CollectiveWork>(stream_on(current_device), Tensors{}, false); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return queue("broadcast", tensors, tensors, [gloo = gloo_, places = places_of(tensors), options] {
      auto seen = seen_by_streams(places);
      gloo->broadcast(seen, options)->wait();
    });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return queue("allreduce", tensors, tensors, [gloo = gloo_, places = places_of(tensors), reduction = Reduction(options.reduceOp, size_)] {
      for (auto& place : places) reduction.run(gloo, {seen_by_streams(place)});
    });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override { return allreduce(tensors, options); }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    bool is_root = options.rootRank == rank_;
    return queue("reduce", tensors, tensors, [gloo = gloo_, places = places_of(tensors), reduction = Reduction(options.reduceOp, size_), is_root] {
      for (auto& place : places) {
        auto seen = seen_by_streams(place);
        auto sum = seen.clone();
        reduction.run(gloo, {sum});
        if (is_root) seen.copy_(sum);
      }
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return queue("allgather", outputs[0], inputs, [gloo = gloo_, to = places_of(outputs[0]), from = places_of(inputs), options] {
      std::vector<Tensors> outputs{seen_by_streams(to)};
      auto inputs = seen_by_streams(from);
      gloo->allgather(outputs, inputs, options)->wait();
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return queue("allgather", {output}, {input}, [gloo = gloo_, to = place_of(output), from = place_of(input), size = size_] {
      Tensors inputs{seen_by_streams(from).contiguous().view(-1)};
      std::vector<Tensors> parts(1);
      auto output = seen_by_streams(to).view({size, -1});
      for (int i = 0; i < size; i++) parts[0].push_back(at::empty_like(inputs[0]));  // the input may be a part of the output
      gloo->allgather(parts, inputs, {})->wait();
      for (int i = 0; i < size; i++) output[i].copy_(parts[0][i]);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    WorkPtr last;
    for (size_t i = 0; i < outputs.size(); i++) last = _allgather_base(outputs[i], inputs[i], options);
    return last;
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return queue("reduce_scatter", {output}, {input}, [gloo = gloo_, to = place_of(output), from = place_of(input), reduction = Reduction(options.reduceOp, size_), rank = rank_, size = size_] {
      auto sum = seen_by_streams(from).contiguous().clone().view({size, -1});
      reduction.run(gloo, {sum});
      seen_by_streams(to).view(-1).copy_(sum[rank]);
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    WorkPtr last;
    for (size_t i = 0; i < outputs.size(); i++) last = _reduce_scatter_base(outputs[i], inputs[i], options);
    return last;
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return queue("reduce_scatter", outputs, inputs[0], [gloo = gloo_, to = place_of(outputs[0]), from = places_of(inputs[0]), reduction = Reduction(options.reduceOp, size_), rank = rank_] {
      auto parts = seen_by_streams(from);
      for (auto& part : parts) part = part.clone();
      for (auto& part : parts) reduction.run(gloo, {part});
      seen_by_streams(to).copy_(parts[rank]);
    });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return queue("scatter", outputs, inputs.empty() ? Tensors{} : inputs[0], [gloo = gloo_, to = places_of(outputs), from = places_of(inputs.empty() ? Tensors{} : inputs[0]), options] {
      auto outputs = seen_by_streams(to);
      std::vector<Tensors> inputs;
      if (!from.empty()) inputs.push_back(seen_by_streams(from));
      gloo->scatter(outputs, inputs, options)->wait();
    });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto to = outputs.empty() ? Tensors{} : outputs[0];
    return queue("gather", to, inputs, [gloo = gloo_, to = places_of(to), from = places_of(inputs), options] {
      auto inputs = seen_by_streams(from);
      std::vector<Tensors> outputs;
      if (!to.empty()) outputs.push_back(seen_by_streams(to));
      gloo->gather(outputs, inputs, options)->wait();
    });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes, const c10d::AllToAllOptions& options) override {
    return queue("alltoall", {output}, {input}, [gloo = gloo_, to = place_of(output), from = place_of(input), to_sizes, from_sizes, options]() mutable {
      auto output = seen_by_streams(to), input = seen_by_streams(from);
      gloo->alltoall_base(output, input, to_sizes, from_sizes, options)->wait();
    });
  }
  // Gloo keeps a message until it is fetched, so the sender's stream need not wait: two ranks that both send first are no deadlock.
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return queue("send", tensors, tensors, [gloo = gloo_, places = places_of(tensors), to, tag] {
      static auto* under_way = new std::vector<std::pair<WorkPtr, Tensors>>;
      static auto* turn = new std::mutex;
      auto copies = seen_by_streams(places);
      for (auto& copy : copies) copy = copy.clone();
      auto sent = gloo->send(copies, to, tag);
      std::lock_guard lock(*turn);
      under_way->emplace_back(sent, copies);
    });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return queue("recv", tensors, tensors, [gloo = gloo_, places = places_of(tensors), from, tag] {
      auto seen = seen_by_streams(places);
      gloo->recv(seen, from, tag)->wait();
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto device = options.device_ids.empty() ? current_device : static_cast<DeviceIndex>(options.device_ids[0]);
    return queue_on(device, "barrier", {}, {}, [gloo = gloo_] { gloo->barrier({})->wait(); }, true);
  }

 private:
  Gloo gloo_;
  std::atomic<uint64_t> num_calls_{0};
  std::map<DeviceIndex, StreamId> ids_;
  std::mutex mutex_;

  Stream& stream_on(DeviceIndex device) {
    std::lock_guard lock(mutex_);
    if (!ids_.count(device)) ids_[device] = take_from_pool(device);
    return stream_of(device, ids_[device]);
  }
  WorkPtr queue(const char* name, const Tensors& outputs, const Tensors& inputs, Function run) {
    auto device = static_cast<DeviceIndex>((outputs.empty() ? inputs : outputs)[0].get_device());
    return queue_on(device, name, outputs, inputs, std::move(run), false);
  }
  WorkPtr queue_on(DeviceIndex device, const char* name, const Tensors& outputs, const Tensors& inputs, Function run, bool is_barrier) {
    num_calls_++;
    auto& stream = stream_on(device);
    block_stream(stream, record_event(current_stream(device)));
    push(stream, std::string("collective ") + name, std::move(run));
    for (auto* tensors : {&outputs, &inputs})
      for (auto& tensor : *tensors) record_stream_on(tensor.storage().mutable_data(), stream);
    return c10::make_intrusive<CollectiveWork>(stream, outputs, is_barrier);
  }
};

// DDP looks at the times of its phases now and then, on any device.
struct PhaseTimer final : c10d::Timer {
  explicit PhaseTimer(Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    return std::max<int64_t>(0, getTimeRef(end) - getTimeRef(start));
  }
};

inline void bind_process_group(py::module& m) {
  m.def("make_process_group", [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> { return c10::make_intrusive<ProcessGroup>(gloo); });
}
}  // namespace fake_cuda

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::DEVICE_KEY, fake_cuda::PhaseTimer)
}  // namespace c10d
