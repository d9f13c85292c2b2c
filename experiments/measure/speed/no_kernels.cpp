// CPU kernels that compute nothing: each returns new tensors of the form that it returned when a step was recorded.
//
// What is left of a step's time is the host's: Python, argument parsing, dispatch, autograd, allocation.
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <vector>

namespace {

enum Kind : int64_t { UNDEFINED, NEW, FIRST_ARGUMENT, LIST };  // of a result; host_time.py has the same

struct Call {
  std::string name;
  std::vector<int64_t> results;
  std::vector<at::Tensor> like;  // of each new tensor
};

std::vector<std::vector<Call>> tapes;
size_t tape = 0, position = 0;
std::vector<std::unique_ptr<torch::Library>> kernels;

at::Tensor new_like(const at::Tensor& t) {
  return at::Tensor(at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type()));
}

void nothing(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  TORCH_CHECK(position < tapes[tape].size(), name, " was not recorded");
  const Call& call = tapes[tape][position++];
  // Autograd adds gradients in place unless a dispatch mode looks on, as it does in a recording.
  const bool sum = call.name == "aten::add" && name == "aten::add_";
  TORCH_CHECK(sum || call.name == name, "recorded ", call.name, ", called ", name);
  const auto arguments = op.schema().arguments().size();
  c10::IValue first = (*stack)[stack->size() - arguments];
  stack->resize(stack->size() - arguments);
  auto like = call.like.begin();
  for (auto kind : call.results) {
    if (sum || kind == FIRST_ARGUMENT) {
      stack->push_back(first);
    } else if (kind == UNDEFINED) {
      stack->emplace_back(at::Tensor());
    } else if (kind == NEW) {
      stack->emplace_back(new_like(*like++));
    } else {
      c10::List<at::Tensor> list;
      for (; like != call.like.end(); ++like) list.push_back(new_like(*like));
      stack->emplace_back(std::move(list));
    }
  }
}

void record(int64_t at, std::string name, std::vector<int64_t> results, std::vector<at::Tensor> like) {
  if (tapes.size() <= static_cast<size_t>(at)) tapes.resize(at + 1);
  tapes[at].push_back({std::move(name), std::move(results), std::move(like)});
}

void begin(int64_t at) {
  tape = at;
  position = 0;
}

void replace(std::string overload) {
  kernels.push_back(
      std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__));
  kernels.back()->impl(overload.c_str(), torch::CppFunction::makeFromBoxedFunction<&nothing>());
}

void restore() {
  kernels.clear();
  tapes.clear();
}

}  // namespace

TORCH_LIBRARY(headroom_speed, m) {
  m.def("record(int tape, str name, int[] results, Tensor[] like) -> ()", &record);
  m.def("begin(int tape) -> ()", &begin);
  m.def("replace(str overload) -> ()", &replace);
  m.def("restore() -> ()", &restore);
}
