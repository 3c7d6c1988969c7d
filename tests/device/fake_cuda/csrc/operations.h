// Operations: every one that torch has for the CPU runs on a stream, later, on the shadow of the device's memory.
//
// The host's part of a call: shapes of the results from the meta kernel, memory for them, and a place in the queue. Arguments on the device
// go by address (nothing is kept alive: what is freed too early reads NaN), host tensors by value. What has no meta kernel, or a result that
// is no tensor, makes the host wait, as it does on a GPU, and is counted.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "generators.h"
#include "memory.h"

namespace fake_cuda {
using c10::IValue;

// ---- tensors without their owners

struct Place {
  void* address;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};
inline Place place_of(const at::Tensor& tensor) {
  auto* begin = static_cast<char*>(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->mutable_data());
  return {begin ? begin + tensor.storage_offset() * tensor.element_size() : nullptr, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}
inline at::Tensor seen_by_streams(const Place& place) {
  return at::from_blob(shadow(place.address), place.sizes, place.strides, at::TensorOptions().dtype(place.dtype).device(at::kCPU));
}

// ---- arguments, as they will be when the operation runs

using Late = std::function<IValue()>;

inline Late late_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return [] { return IValue(at::Tensor()); };
  if (is_ours(tensor.device())) return [place = place_of(tensor)] { return IValue(seen_by_streams(place)); };
  return [copy = tensor.detach().clone()] { return IValue(copy); };
}
inline Late late(const IValue& value) {
  if (value.isTensor()) return late_tensor(value.toTensor());
  if (value.isTensorList()) {
    std::vector<Late> parts;
    for (const at::Tensor& tensor : value.toTensorVector()) parts.push_back(late_tensor(tensor));
    return [parts] {
      c10::List<at::Tensor> list;
      for (auto& part : parts) list.push_back(part().toTensor());
      return IValue(list);
    };
  }
  if (value.isOptionalTensorList()) {
    std::vector<std::optional<Late>> parts;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      parts.push_back(tensor ? std::optional(late_tensor(*tensor)) : std::nullopt);
    return [parts] {
      c10::List<std::optional<at::Tensor>> list;
      for (auto& part : parts) list.push_back(part ? std::optional((*part)().toTensor()) : std::nullopt);
      return IValue(list);
    };
  }
  if (value.isDevice() && is_ours(value.toDevice())) return [] { return IValue(Device(DeviceType::CPU)); };
  return [value] { return value; };
}

// ---- arguments, as the meta kernel takes them

inline at::Tensor meta_tensor(const at::Tensor& tensor) {
  // A number stays one: it promotes less than a tensor without dimensions.
  if (!tensor.defined() || (!is_ours(tensor.device()) && tensor.dim() == 0)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}
inline IValue meta(const IValue& value) {
  if (value.isTensor()) return meta_tensor(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(meta_tensor(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      list.push_back(tensor ? std::optional(meta_tensor(*tensor)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && is_ours(value.toDevice())) return Device(DeviceType::Meta);
  if (value.isGenerator()) return IValue();
  return value;
}

// ---- a call

template <typename Visit>
void visit_tensors(const IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      if (tensor) visit(*tensor);
  }
}

// The device of a call; as on a GPU, all tensors lie there, but for numbers and indices.
inline DeviceIndex device_of_call(const std::string& name, const std::vector<IValue>& arguments) {
  DeviceIndex device = -1;
  bool takes_host_tensors = name.find("index") != std::string::npos;
  for (auto& argument : arguments)
    visit_tensors(argument, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      if (!is_ours(tensor.device())) {
        TORCH_CHECK(tensor.dim() == 0 || takes_host_tensors || tensor.numel() == 0, "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", name, ")");
        return;
      }
      TORCH_CHECK(device < 0 || device == tensor.get_device() || tensor.dim() == 0, "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:1! (", name, ")");
      if (device < 0 || tensor.dim() > 0) device = tensor.get_device();
    });
  for (auto& argument : arguments)
    if (device < 0 && argument.isDevice() && is_ours(argument.toDevice()) && argument.toDevice().has_index()) device = argument.toDevice().index();
  return device < 0 ? current_device : device;
}

// Some meta kernels are Python's.
inline void forget_python_error() {
  py::gil_scoped_acquire gil;
  PyErr_Clear();
}

struct Call {
  const c10::OperatorHandle op;
  const c10::FunctionSchema& schema;
  std::vector<IValue> arguments;
  DeviceIndex device;
  Stream& stream;

  Call(const c10::OperatorHandle& op, std::vector<IValue> arguments)
      : op(op), schema(op.schema()), arguments(std::move(arguments)), device(device_of_call(schema.name(), this->arguments)), stream(current_stream(device)) {}

  std::vector<IValue> run() {
    resize_outputs();
    std::vector<IValue> results;
    if (returns_arguments(results)) {
      queue({});
      return results;
    }
    std::vector<Place> targets;
    if (!make_results(results, targets)) return run_now();
    queue(targets);
    return results;
  }

 private:
  std::vector<Late> late_arguments() {
    std::vector<Late> found;
    for (size_t i = 0; i < arguments.size(); i++) {
      if (schema.arguments()[i].type()->str().find("Generator") == std::string::npos) {
        found.push_back(late(arguments[i]));
        continue;
      }
      auto draw = take(arguments[i].isNone() ? default_generator(device) : arguments[i].toGenerator(), stream);
      found.push_back([draw] { return IValue(draw.make()); });
    }
    return found;
  }

  torch::jit::Stack call_meta() {
    torch::jit::Stack stack;
    for (auto& argument : arguments) stack.push_back(meta(argument));
    auto given = stack;
    op.callBoxed(&stack);
    given_to_meta_ = given;
    return stack;
  }

  // `out=` arguments get the size of the result.
  void resize_outputs() {
    bool has_out = false;
    for (auto& argument : schema.arguments()) has_out |= argument.kwarg_only() && argument.alias_info() && argument.alias_info()->isWrite();
    if (!has_out) return;
    try {
      call_meta();
    } catch (const std::exception&) {
      forget_python_error();
      return;
    }
    for (size_t i = 0; i < arguments.size(); i++) {
      if (!arguments[i].isTensor() || !arguments[i].toTensor().defined() || !is_ours(arguments[i].toTensor().device())) continue;
      auto sizes = given_to_meta_[i].toTensor().sizes();
      if (arguments[i].toTensor().sizes() != sizes) arguments[i].toTensor().resize_(sizes);
    }
  }

  // In place and out variants: every result is one of the arguments.
  bool returns_arguments(std::vector<IValue>& results) {
    for (auto& returned : schema.returns()) {
      if (!returned.alias_info()) return false;
      for (size_t i = 0; i < arguments.size(); i++) {
        auto* info = schema.arguments()[i].alias_info();
        if (info && info->beforeSets() == returned.alias_info()->beforeSets()) results.push_back(arguments[i]);
      }
    }
    return results.size() == schema.returns().size();
  }

  at::Tensor room_for(const at::Tensor& meta, std::vector<Place>& targets) {
    if (!meta.defined()) {
      targets.push_back({});
      return meta;
    }
    auto made = at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(Device(DEVICE_TYPE, device)));
    targets.push_back(place_of(made));
    return made;
  }
  bool make_results(std::vector<IValue>& results, std::vector<Place>& targets) {
    torch::jit::Stack shapes;
    try {
      shapes = call_meta();
    } catch (const std::exception&) {
      // No meta kernel, a shape that depends on values, or a wrong call: the operation itself says which, at once.
      forget_python_error();
      return false;
    }
    for (auto& shape : shapes) {
      if (shape.isTensor()) {
        results.push_back(room_for(shape.toTensor(), targets));
      } else if (shape.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : shape.toTensorVector()) list.push_back(room_for(tensor, targets));
        results.push_back(list);
      } else {
        return false;
      }
    }
    return true;
  }

  void queue(std::vector<Place> targets) {
    push(stream, schema.name(), [op = op, parts = late_arguments(), targets = std::move(targets)] {
      torch::jit::Stack stack;
      for (auto& part : parts) stack.push_back(part());
      op.callBoxed(&stack);
      size_t k = 0;
      for (auto& result : stack)
        visit_tensors(result, [&](const at::Tensor& tensor) {
          if (k >= targets.size()) return;
          if (tensor.defined() && targets[k].address) seen_by_streams(targets[k]).copy_(tensor);
          k++;
        });
    });
  }

  std::vector<IValue> run_now() {
    synchronize(stream, schema.name());
    torch::jit::Stack stack;
    for (auto& part : late_arguments()) stack.push_back(part());
    op.callBoxed(&stack);
    std::vector<IValue> results;
    for (auto& value : stack) {
      if (!value.isTensor() || !value.toTensor().defined()) {
        results.push_back(value);
        continue;
      }
      std::vector<Place> targets;
      results.push_back(room_for(value.toTensor(), targets));
      // In stream order too: the memory may still have to be filled.
      if (targets[0].address) stream.queue({"result", [target = targets[0], result = value.toTensor()] { seen_by_streams(target).copy_(result); }});
    }
    return results;
  }

  torch::jit::Stack given_to_meta_;
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::NoGradGuard no_grad;
  size_t count = op.schema().arguments().size();
  auto results = Call(op, {stack->end() - count, stack->end()}).run();
  torch::jit::drop(*stack, count);
  for (auto& result : results) stack->push_back(std::move(result));
}

// ---- memory

inline DeviceIndex index_of(std::optional<Device> device) {
  auto index = device && device->has_index() ? device->index() : current_device;
  check_device(index);
  return index;
}
// The allocator has no argument for the device, so the current one is lent.
struct OnDevice {
  DeviceIndex before = current_device;
  explicit OnDevice(DeviceIndex device) { current_device = device; }
  ~OnDevice() { current_device = before; }
};
inline at::ScalarType checked(std::optional<at::ScalarType> dtype) {
  auto found = dtype.value_or(at::get_default_dtype_as_scalartype());
  TORCH_CHECK_TYPE(found != at::kDouble || controls().has_float64, "this device has no float64");
  return found;
}
inline at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice here(index_of(device));
  return at::detail::empty_generic(sizes, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::DEVICE_KEY), checked(dtype), format);
}
inline at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  OnDevice here(index_of(device));
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::DEVICE_KEY), checked(dtype));
}
inline void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  auto device = storage->device().index();
  auto made = allocate_on(device, bytes);
  size_t both = std::min(storage->nbytes(), bytes);
  if (both) {
    void *to = shadow(made.get()), *from = shadow(storage->mutable_data());
    push(current_stream(device), "resize", [to, from, both] { memcpy(to, from, both); });
  }
  storage->set_data_ptr(std::move(made));
  storage->set_nbytes(bytes);
}
inline const at::Tensor& resize_(const at::Tensor& tensor, c10::SymIntArrayRef symbolic, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(symbolic);
  size_t needed = tensor.element_size() * (c10::multiply_integers(sizes) + tensor.storage_offset());
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < needed) resize_storage(storage, needed);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format) tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return tensor;
}

// ---- copies

inline at::Tensor& copy_between_devices(at::Tensor& to, const at::Tensor& from) {
  auto &source = current_stream(from.get_device()), &target = current_stream(to.get_device());
  block_stream(source, record_event(target));
  push(source, "copy between devices", [to = place_of(to), from = place_of(from)] { seen_by_streams(to).copy_(seen_by_streams(from)); });
  block_stream(target, record_event(source));
  return to;
}
inline at::Tensor& copy_(at::Tensor& to, const at::Tensor& given, bool non_blocking) {
  at::NoGradGuard no_grad;
  if (to.is_same(given) || !to.numel()) return to;
  at::Tensor from = given.expand(to.sizes());
  if (is_ours(to.device()) && is_ours(from.device())) {
    if (to.get_device() != from.get_device()) return copy_between_devices(to, from);
    push(current_stream(to.get_device()), "copy", [to = place_of(to), from = place_of(from)] { seen_by_streams(to).copy_(seen_by_streams(from)); });
    return to;
  }
  bool is_to_host = to.is_cpu();
  auto& stream = current_stream(is_to_host ? from.get_device() : to.get_device());
  bool is_async = non_blocking && is_pinned((is_to_host ? to : from).storage().data());
  const char* name = is_to_host ? "copy to host" : "copy to device";
  auto& c = controls();
  (is_to_host ? c.num_to_host : c.num_to_device)++;
  (is_to_host ? c.bytes_to_host : c.bytes_to_device) += to.nbytes();
  if (!is_async) forbid_in_capture(std::string(name) + ", pageable or blocking");
  // A copy to the device reads pageable memory now, pinned memory when it runs.
  if (!is_to_host && !is_async) from = from.clone();
  push(stream, name, [to = place_of(to), from = place_of(from), keep = (is_to_host ? to : from).storage()] {
    seen_by_streams(to).copy_(seen_by_streams(from));
  });
  if (!is_async) synchronize(stream, name);
  return to;
}
inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  return copy_(target, from, non_blocking);
}
inline at::Scalar item(const at::Tensor& tensor) {
  synchronize(current_stream(tensor.get_device()), "item");
  return at::_local_scalar_dense(seen_by_streams(place_of(tensor)));
}

// ---- the few that need more than the fallback

inline void record_stream(at::Tensor& tensor, c10::Stream stream) { record_stream_on(tensor.storage().mutable_data(), stream_of(stream)); }
inline at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef sizes) { return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(sizes)); }
inline at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
inline at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}
inline at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage) {
  int64_t count = storage.nbytes() / tensor.element_size();
  return at::native::set_storage_cpu_(tensor, storage, 0, {count}, {1});
}
// Takes no generator, so it would draw from the host's.
inline std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> is_training) {
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!is_training.value_or(true)) return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}
// Attention by matrix products: kernels of its own would be the CPU's.
inline int64_t choose_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) { return 0; }
}  // namespace fake_cuda

TORCH_LIBRARY_IMPL(_, DEVICE_KEY, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fake_cuda::fallback>()); }
TORCH_LIBRARY_IMPL(aten, DEVICE_KEY, m) {
  m.impl("empty.memory_format", fake_cuda::empty);
  m.impl("empty_strided", fake_cuda::empty_strided);
  m.impl("resize_", fake_cuda::resize_);
  m.impl("copy_", fake_cuda::copy_);
  m.impl("_copy_from", fake_cuda::copy_from);
  m.impl("_local_scalar_dense", fake_cuda::item);
  m.impl("record_stream", fake_cuda::record_stream);
  m.impl("view", fake_cuda::view);
  m.impl("as_strided", fake_cuda::as_strided);
  m.impl("_reshape_alias", fake_cuda::reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("is_set_to", at::native::is_set_to);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Storage", fake_cuda::set_storage);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("native_dropout", fake_cuda::native_dropout);
  // As one operation: its parts have no meta kernels, and the host would wait where it does not on a GPU.
  for (auto* name : {"convolution", "convolution_backward"}) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fake_cuda::fallback>());
  m.impl("_fused_sdp_choice", fake_cuda::choose_attention);
}
