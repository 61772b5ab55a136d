// The leaf functions in C++: each makes the same torch calls as the Python function that it replaces.
//
// `bind(name, twin)` returns the function `name`. It calls its Python twin instead of itself where the two might differ:
// for tensor subclasses, inside modes of torch functions, and where autograd would record the calls.

#include <torch/csrc/autograd/python_variable.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;
using Ints = std::vector<int64_t>;
using Tensors = std::vector<Tensor>;
using Messages = std::vector<std::pair<int64_t, Tensor>>;  // coord of a peer, and a tensor that is sent or received
using Receives = std::vector<std::pair<int64_t, Ints>>;    // coord of a peer, and the shape that it sends

// Whether torch calls leave autograd out, which records nothing here and takes time: views and writes are not noted. A
// dispatch mode would see calls that are not decomposed.
bool skips_autograd() { return !c10::impl::dispatch_mode_enabled(); }

// ---------------------------------------------------------------------- norms of small blocks: small_norm.py

Tensor spread(const Tensor& statistic, const Maybe& group_of) {
  return group_of ? statistic.index_select(1, *group_of) : statistic;
}

Tensor shaped(const Tensor& value, const Ints& shape) { return value.sizes() == shape ? value : value.reshape(shape); }

Maybe expand(const Maybe& parameter, const Ints& shape) {
  if (!parameter) return std::nullopt;
  return parameter->reshape(shape).to(at::kFloat);
}

std::tuple<Tensor, Tensor> norm_moments(const Tensor& input, Ints shape, Ints dims, const Tensor& share) {
  Tensor wide = shaped(input, shape).to(at::kDouble);
  Tensor moments = at::stack({wide, wide * wide});
  if (!dims.empty()) moments = moments.sum(dims, true);
  return {wide, moments.mul_(share)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Maybe> normalize(
    const Tensor& wide, const Tensor& moments, const Tensor& eps, Maybe weight, Maybe bias, Ints shape,
    Maybe group_of, Ints full) {
  Tensors both = moments.unbind();
  const Tensor& mean = both[0];
  Tensor variance = at::addcmul(both[1], mean, mean, -1).clamp_min_(0);
  Tensor rstd = (variance + eps).rsqrt_().to(at::kFloat);
  Tensor normalized = (wide - spread(mean, group_of)).to(at::kFloat).mul_(spread(rstd, group_of));
  Maybe w = expand(weight, shape), b = expand(bias, shape);
  Tensor out = w ? (b ? at::addcmul(*b, normalized, *w) : normalized * *w) : b ? normalized + *b : normalized.clone();
  return {shaped(out, full), mean, variance, normalized, rstd, w};
}

std::tuple<Tensor, Tensor> norm_grad_sums(const Tensor& grad, const Tensor& normalized, Ints shape, Ints dims) {
  Tensor g = shaped(grad.to(at::kFloat), shape);
  Tensor sums = at::stack({g, g * normalized});
  return {g, dims.empty() ? sums : sums.sum(dims, true)};
}

std::tuple<Maybe, Tensor, Tensor> norm_grads(
    const Tensor& g, const Tensor& normalized, Maybe stats, const Tensor& params, const Tensor& rstd, Maybe w,
    const Tensor& share, bool batch, Maybe group_of, Ints full) {
  Tensors of_params = params.reshape({2, -1}).unbind();
  if (!stats) return {std::nullopt, of_params.at(0), of_params.at(1)};
  Tensor scale = spread(rstd, group_of);
  if (w) scale = scale * *w;
  Tensors both = (*stats * (batch ? scale : rstd)).mul_(share).unbind();
  Tensor level = spread(both.at(0), group_of), slope = spread(both.at(1), group_of);
  Tensor grad_input = at::addcmul(level, normalized, slope).addcmul_(g, scale);
  return {shaped(grad_input, full), of_params.at(0), of_params.at(1)};
}

// ---------------------------------------------------------------------- softmax along a sharded dim: softmax.py

std::tuple<Tensor, Tensor, Tensor> shifted_exp(const Tensor& value, const Tensor& top, int64_t dim) {
  Tensor shifted = value - top, powers = shifted.exp();
  return {shifted, powers, powers.sum(dim, true)};
}

std::tuple<Tensor, Tensor> product_sum(const Tensor& wide, const Tensor& out, int64_t dim) {
  Tensor part = wide * out;
  return {part, part.sum(dim, true)};
}

// ---------------------------------------------------------------------- routes: comm/route_messages.py

std::optional<std::tuple<Tensor, Messages, Messages, Tensors>> pack_split(
    const Tensor& tensor, int64_t dim, Ints sizes, Ints chosen, Ints peers, Receives receives, bool stacked) {
  if (tensor.is_conj() || tensor.is_neg() || tensor._is_zerotensor()) return std::nullopt;
  bool repeats = std::count(tensor.strides().begin(), tensor.strides().end(), 0) > 0;
  if (!tensor.is_contiguous() && !repeats) return std::nullopt;
  Tensor block = tensor.contiguous();
  Tensors parts, buffers;
  for (const Tensor& part : block.split_with_sizes(sizes, dim)) parts.push_back(part);
  Tensors chosen_parts;
  for (size_t i = 0; i < peers.size(); ++i) chosen_parts.push_back(parts.at(chosen.at(i)));
  if (stacked) chosen_parts = at::stack(chosen_parts).unbind();
  Messages sends, incoming;
  for (size_t i = 0; i < peers.size(); ++i) sends.emplace_back(peers[i], chosen_parts[i].contiguous());
  for (const auto& [peer, shape] : receives) {
    buffers.push_back(block.new_empty(shape));
    incoming.emplace_back(peer, buffers.back());
  }
  return std::make_tuple(block, sends, incoming, buffers);
}

Tensor kept_part(const Tensor& block, const Ints& kept) {
  return kept.empty() ? block : block.narrow(kept.at(0), kept.at(1), kept.at(2));
}

Tensor join_split(const Tensor& block, Tensors received, Ints kept, int64_t dim, Ints order) {
  Tensor own = kept_part(block, kept);
  Tensors parts;
  for (int64_t i : order) parts.push_back(i < 0 ? own : received.at(i));
  return at::cat(parts, dim);
}

Tensor add_split(const Tensor& block, Tensors received, Ints kept, int64_t dim, Ints sizes, Ints chosen, bool owned,
                 bool joins) {
  Tensor own = kept_part(block, kept);
  Tensor out = owned ? own : own.clone(at::MemoryFormat::Contiguous);
  Tensors parts = out.split_with_sizes(sizes, dim);
  if (joins) {
    for (size_t i = 0; i < chosen.size(); ++i) parts.at(chosen[i]) = received.at(i).add_(parts.at(chosen[i]));
    return at::cat(parts, dim);
  }
  Tensors targets;
  for (int64_t i : chosen) targets.push_back(parts.at(i));
  at::_foreach_add_(targets, received);
  if (owned && skips_autograd() && !block.is_inference()) block.unsafeGetTensorImpl()->bump_version();
  return out;
}

// ---------------------------------------------------------------------- from and to Python

bool enabled = true;

template <class T>
struct Arg {};
template <>
struct Arg<Tensor> {
  static bool accepts(PyObject* o) { return THPVariable_CheckExact(o); }
  static const Tensor& get(PyObject* o) { return THPVariable_Unpack(o); }
};
template <class T>
struct Arg<std::optional<T>> {
  static bool accepts(PyObject* o) { return o == Py_None || Arg<T>::accepts(o); }
  static std::optional<T> get(PyObject* o) {
    return o == Py_None ? std::optional<T>() : std::optional<T>(Arg<T>::get(o));
  }
};
template <>
struct Arg<bool> {
  static bool accepts(PyObject* o) { return PyBool_Check(o); }
  static bool get(PyObject* o) { return o == Py_True; }
};
template <>
struct Arg<int64_t> {
  static bool accepts(PyObject* o) { return PyLong_CheckExact(o); }
  static int64_t get(PyObject* o) { return PyLong_AsLongLong(o); }
};
template <class T>
struct Arg<std::vector<T>> {  // of a list or a tuple
  static bool accepts(PyObject* o) {
    if (!PyList_Check(o) && !PyTuple_Check(o)) return false;
    PyObject** items = PySequence_Fast_ITEMS(o);
    return std::all_of(items, items + PySequence_Fast_GET_SIZE(o), Arg<T>::accepts);
  }
  static std::vector<T> get(PyObject* o) {
    std::vector<T> values;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); ++i)
      values.push_back(Arg<T>::get(PySequence_Fast_ITEMS(o)[i]));
    return values;
  }
};
template <class A, class B>
struct Arg<std::pair<A, B>> {
  static bool accepts(PyObject* o) {
    return PyTuple_Check(o) && PyTuple_GET_SIZE(o) == 2 && Arg<A>::accepts(PyTuple_GET_ITEM(o, 0)) &&
           Arg<B>::accepts(PyTuple_GET_ITEM(o, 1));
  }
  static std::pair<A, B> get(PyObject* o) {
    return {Arg<A>::get(PyTuple_GET_ITEM(o, 0)), Arg<B>::get(PyTuple_GET_ITEM(o, 1))};
  }
};

template <class... T>
PyObject* wrap(std::tuple<T...> values);
PyObject* wrap(int64_t value) { return PyLong_FromLongLong(value); }
PyObject* wrap(Tensor value) { return THPVariable_Wrap(std::move(value)); }
template <class T>
PyObject* wrap(std::optional<T> value) { return value ? wrap(*std::move(value)) : Py_NewRef(Py_None); }
template <class A, class B>
PyObject* wrap(std::pair<A, B> value) { return wrap(std::make_tuple(std::move(value.first), std::move(value.second))); }
template <class T>
PyObject* wrap(std::vector<T> values) {
  PyObject* out = PyList_New(values.size());
  for (size_t i = 0; i < values.size(); ++i) PyList_SET_ITEM(out, i, wrap(std::move(values[i])));
  return out;
}
template <class... T>
PyObject* wrap(std::tuple<T...> values) {
  PyObject* out = PyTuple_New(sizeof...(T));
  Py_ssize_t i = 0;
  std::apply([&](auto&... value) { (PyTuple_SET_ITEM(out, i++, wrap(std::move(value))), ...); }, values);
  return out;
}

template <auto F, class R, class... A, size_t... I>
PyObject* call(R (*)(A...), std::index_sequence<I...>, PyObject* twin, PyObject* const* args, Py_ssize_t count) {
  if (!enabled || count != sizeof...(A) || at::GradMode::is_enabled() || at::impl::torch_function_mode_enabled() ||
      !(Arg<std::decay_t<A>>::accepts(args[I]) && ...))
    return PyObject_Vectorcall(twin, args, count, nullptr);
  HANDLE_TH_ERRORS
  std::optional<at::AutoDispatchBelowADInplaceOrView> no_autograd;
  if (skips_autograd()) no_autograd.emplace();
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  auto call = [&](auto... values) {
    py::gil_scoped_release no_gil;
    return F(std::move(values)...);
  };
  return wrap(call(Arg<std::decay_t<A>>::get(args[I])...));
  END_HANDLE_TH_ERRORS
}

template <class R, class... A>
constexpr size_t arity(R (*)(A...)) { return sizeof...(A); }

template <auto F>
PyObject* leaf(PyObject* twin, PyObject* const* args, Py_ssize_t count) {
  return call<F>(F, std::make_index_sequence<arity(F)>(), twin, args, count);
}

template <auto F>
constexpr PyMethodDef define(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(leaf<F>)), METH_FASTCALL, nullptr};
}

PyMethodDef leaves[] = {
    define<norm_moments>("norm_moments"),
    define<normalize>("normalize"),
    define<norm_grad_sums>("norm_grad_sums"),
    define<norm_grads>("norm_grads"),
    define<shifted_exp>("shifted_exp"),
    define<product_sum>("product_sum"),
    define<pack_split>("pack_split"),
    define<join_split>("join_split"),
    define<add_split>("add_split"),
};

PyObject* bind(PyObject*, PyObject* args) {
  const char* name;
  PyObject* twin;
  if (!PyArg_ParseTuple(args, "sO", &name, &twin)) return nullptr;
  for (PyMethodDef& definition : leaves)
    if (!strcmp(definition.ml_name, name)) return PyCFunction_New(&definition, twin);
  return Py_NewRef(twin);
}

PyObject* enable(PyObject*, PyObject* on) {
  bool before = enabled;
  enabled = PyObject_IsTrue(on);
  return PyBool_FromLong(before);
}

PyMethodDef methods[] = {
    {"bind", bind, METH_VARARGS, nullptr}, {"enable", enable, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "leaves", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_leaves() { return PyModule_Create(&definition); }
