// The host's time for one free and one alloc of device memory, through the allocator that PyTorch has installed.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <random>
#include <thread>
#include <vector>

namespace {

using c10::cuda::CUDACachingAllocator::CUDAAllocator;

struct Case {
  size_t live;   // blocks that stay allocated
  size_t pairs;  // how many are timed
  size_t size_min, size_max;
  size_t sizes;  // how many sizes there are, drawn evenly on a logarithmic scale
};

// Frees a random block and allocates another, `pairs` times; returns nanoseconds a pair. All draws are made before the clock starts.
double churn(CUDAAllocator& allocator, cudaStream_t stream, const Case& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<size_t> sizes(c.sizes);
  for (auto& size : sizes) {
    double share = std::generate_canonical<double, 53>(random);
    size = static_cast<size_t>(c.size_min * std::pow(static_cast<double>(c.size_max) / c.size_min, share));
  }
  std::vector<void*> blocks(c.live);
  for (auto& block : blocks) block = allocator.raw_alloc_with_stream(sizes[random() % c.sizes], stream);
  std::vector<std::pair<uint32_t, uint32_t>> draws(c.pairs);
  for (auto& draw : draws) draw = {random() % c.live, random() % c.sizes};
  auto pass = [&] {
    for (auto [index, size] : draws) {
      allocator.raw_delete(blocks[index]);
      blocks[index] = allocator.raw_alloc_with_stream(sizes[size], stream);
    }
  };
  pass();  // until no request needs the driver
  auto start = std::chrono::steady_clock::now();
  pass();
  auto end = std::chrono::steady_clock::now();
  for (void* block : blocks) allocator.raw_delete(block);
  return std::chrono::duration<double, std::nano>(end - start).count() / c.pairs;
}

// Returns nanoseconds a pair, the mean over `threads` threads that run at once, each on a stream of its own.
double measure(size_t threads, size_t live, size_t pairs, size_t size_min, size_t size_max, size_t sizes) {
  pybind11::gil_scoped_release no_gil;
  auto& allocator = *c10::cuda::CUDACachingAllocator::get();
  std::vector<cudaStream_t> streams(threads, nullptr);
  for (size_t i = 1; i < threads; i++) {
    if (cudaStreamCreate(&streams[i]) != cudaSuccess) throw std::runtime_error("cudaStreamCreate failed");
  }
  std::vector<double> times(threads);
  std::vector<std::thread> workers;
  std::atomic<size_t> ready{0};
  for (size_t i = 0; i < threads; i++) {
    workers.emplace_back([&, i] {
      cudaSetDevice(0);
      ready++;
      while (ready < threads) {
      }
      times[i] = churn(allocator, streams[i], {live, pairs, size_min, size_max, sizes}, 17 + i);
    });
  }
  double sum = 0;
  for (size_t i = 0; i < threads; i++) {
    workers[i].join();
    sum += times[i];
  }
  return sum / threads;
}

// Returns nanoseconds for one free and one alloc of a block that as many other streams used, in which nothing runs.
double measure_recorded(size_t others, size_t live, size_t pairs) {
  pybind11::gil_scoped_release no_gil;
  auto& allocator = *c10::cuda::CUDACachingAllocator::get();
  std::vector<c10::cuda::CUDAStream> streams;
  for (size_t i = 0; i < others; i++) streams.push_back(c10::cuda::getStreamFromPool(false, 0));
  std::mt19937_64 random(17);
  std::vector<size_t> draws(pairs);
  for (auto& draw : draws) draw = random() % live;
  std::vector<c10::DataPtr> blocks(live);
  auto use = [&](c10::DataPtr& block, size_t index) {
    block = allocator.allocate((index % 64 + 1) << 12);
    for (auto stream : streams) allocator.recordStream(block, stream);
  };
  for (size_t i = 0; i < live; i++) use(blocks[i], i);
  auto pass = [&] {
    for (size_t index : draws) {
      blocks[index].clear();
      use(blocks[index], index);
    }
  };
  pass();
  auto start = std::chrono::steady_clock::now();
  pass();
  auto end = std::chrono::steady_clock::now();
  return std::chrono::duration<double, std::nano>(end - start).count() / pairs;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("measure", &measure);
  module.def("measure_recorded", &measure_recorded);
}
