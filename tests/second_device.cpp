// A second device, whose memory is the host's: its operators run on the CPU, and an operator that
// is given tensors of both is refused, as a GPU refuses it. So where a model's tensors have to be
// together can be tested without a GPU.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

using namespace at;

const Device HERE(DeviceType::PrivateUse1, 0);
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

struct Memory final : Allocator {
  DataPtr allocate(size_t size) override {
    void* place = size ? malloc(size) : nullptr;
    return {place, place, &free, HERE};
  }
  DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};
static Memory memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return HERE.type(); }
  Device exchangeDevice(Device) const override { return HERE; }
  Device getDevice() const override { return HERE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::Stream getStream(Device) const override { return c10::Stream(c10::Stream::DEFAULT, HERE); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : PrivateUse1HooksInterface {
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};

// A tensor of the CPU over the same memory, and a copy of one of the CPU here.
Tensor host(const Tensor& x) {
  if (!x.defined() || x.device() != HERE) return x;
  auto options = x.options().device(kCPU).requires_grad(false);
  auto keep = [x](void*) {};
  void* data = x.storage().mutable_data();
  return from_blob(data, x.sizes(), x.strides(), x.storage_offset(), keep, options);
}
Tensor here(const Tensor& x) {
  if (!x.defined()) return x;
  auto result = empty_strided(x.sizes(), x.strides(), x.options().device(HERE));
  host(result).copy_(x);
  return result;
}

using Dtype = std::optional<ScalarType>;
using Where = std::optional<Device>;
using Form = std::optional<Layout>;
using Pinned = std::optional<bool>;
using Format = std::optional<MemoryFormat>;

Tensor empty_here(IntArrayRef size, Dtype dtype, Form, Where, Pinned, Format format) {
  return at::detail::empty_generic(size, &memory, KEYS, dtype_or_default(dtype), format);
}
Tensor make_strided(IntArrayRef size, IntArrayRef stride, Dtype dtype, Form, Where, Pinned) {
  return at::detail::empty_strided_generic(size, stride, &memory, KEYS, dtype_or_default(dtype));
}
Tensor copy_from_here(const Tensor& from, const Tensor& to, bool) {
  host(to).copy_(host(from));
  return to;
}
Tensor copy_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from_here(from, to, false);
}
Tensor as_strided_here(const Tensor& x, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> at) {
  return cpu::as_strided(x, size, stride, at);
}
Tensor alias_here(const Tensor& x, IntArrayRef size, IntArrayRef stride) {
  return x.as_strided(size, stride, x.storage_offset());
}
Tensor viewed(const Tensor& x, IntArrayRef size) {
  auto whole = infer_size(size, x.numel());
  auto stride = at::detail::computeStride(x.sizes(), x.strides(), whole);
  TORCH_CHECK(stride.has_value(), "no view has this size: use reshape");
  return alias_here(x, whole, *stride);
}
Scalar number(const Tensor& x) { return host(x).item(); }
Tensor& set_here(Tensor& x, Storage from, int64_t at, IntArrayRef size, IntArrayRef stride) {
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(from);
  x.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, at);
  return x;
}
const Tensor& resized(const Tensor& x, IntArrayRef size, Format format) {
  auto other = at::detail::empty_generic(size, &memory, KEYS, x.scalar_type(), format);
  auto* own = x.storage().unsafeGetStorageImpl();
  size_t before = own->nbytes(), after = other.storage().nbytes();
  if (after > before) {
    auto place = memory.allocate(after);
    if (before) memcpy(place.get(), own->data(), before);
    own->set_data_ptr_noswap(std::move(place));
    own->set_nbytes(after);
  }
  x.unsafeGetTensorImpl()->set_sizes_and_strides(size, other.strides(), x.storage_offset());
  return x;
}

void check_together(bool of_here, bool of_host, const std::string& name) {
  TORCH_CHECK(!(of_here && of_host), "expected all tensors on one device in ", name);
}
Tensor convolved(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, IntArrayRef s,
                 IntArrayRef p, IntArrayRef d, bool t, IntArrayRef o, int64_t g) {
  std::optional<Tensor> bias;
  if (b && b->defined()) bias = host(*b);
  bool all = x.device() == HERE && w.device() == HERE && (!bias || b->device() == HERE);
  check_together(true, !all, "convolution");
  return here(convolution(host(x), host(w), bias, s, p, d, t, o, g));
}
std::tuple<Tensor, Tensor, Tensor> convolved_back(
    const Tensor& grad, const Tensor& x, const Tensor& w, IntArrayRef s, IntArrayRef p,
    IntArrayRef d, bool t, IntArrayRef o, int64_t g, std::array<bool, 3> mask) {
  std::vector<int64_t> bias = {t ? w.size(1) * g : w.size(0)};
  auto [of_x, of_w, of_b] = convolution_backward(
      host(grad), host(x), host(w), IntArrayRef(bias), s, p, d, t, o, g, mask);
  return {here(of_x), here(of_w), here(of_b)};
}

void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto name = op.schema().name();
  bool of_here = false, of_host = false;
  auto look = [&](const Tensor& x) {
    if (!x.defined()) return;
    if (x.device() == HERE) of_here = true;
    else if (x.dim() > 0) of_host = true;  // numbers may be anywhere
  };
  for (auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList())
      for (const Tensor& x : value.toTensorVector()) look(x);
  }
  check_together(of_here, of_host, name);
  native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_here);
  m.impl("empty_strided", make_strided);
  m.impl("_copy_from", copy_from_here);
  m.impl("_copy_from_and_resize", copy_and_resize);
  m.impl("as_strided", as_strided_here);
  m.impl("_reshape_alias", alias_here);
  m.impl("view", viewed);
  m.impl("_local_scalar_dense", number);
  m.impl("set_.source_Storage_storage_offset", set_here);
  m.impl("resize_", resized);
  m.impl("convolution_overrideable", convolved);
  m.impl("convolution_backward_overrideable", convolved_back);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  RegisterPrivateUse1HooksInterface(new Hooks());
  SetAllocator(HERE.type(), &memory);
}
