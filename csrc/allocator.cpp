// replay.py's allocator. It delegates to PyTorch's own, and, in a step, records its requests or
// serves them from an arena at planned offsets. A request goes to PyTorch if it is not the next one
// of the plan, nor one near it that follows the same requests, or if its addresses are in use: a
// wrong plan costs memory, never a number.
#include <c10/core/CPUAllocator.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <vector>

namespace {
enum Mode { IDLE = 0, RECORD = 1, REPLAY = 2 };
std::atomic<int> mode{IDLE};
struct Request { int64_t born, died, size; };  // counted in events; died: -1 while it is alive
std::mutex guard;
std::vector<Request> requests;  // of the recorded step
std::map<int64_t, size_t> alive;  // of the recorded step: address, number of the request
std::vector<int64_t> sizes, offsets;  // the plan; offset -1: it outlives the step, PyTorch's
std::vector<int64_t> seen;  // sizes of the replayed step's requests so far
std::map<int64_t, int64_t> live;  // planned blocks in use: begin, end
std::atomic<int64_t> events;
int64_t min_bytes, align;
// Requests served (hits), that outlive the step (unplanned), that the plan does not have
// (unmatched), whose addresses are in use (occupied).
enum Count { HITS, UNPLANNED, UNMATCHED, OCCUPIED };
std::array<int64_t, 4> counts;
int64_t cursor;  // the plan's next entry
char* arena;
void* stream;  // of CUDA, whose requests count

void note_birth(int64_t address, int64_t size) {
  alive[address] = requests.size();
  requests.push_back({events++, -1, size});
}

void note_death(int64_t address) {
  auto request = alive.find(address);
  if (request == alive.end()) return;  // smaller than min_bytes, or of before the step
  requests[request->second].died = events++;
  alive.erase(request);
}

// Sizes repeat, so one alone tells little where a step leaves its plan: an entry so far BEFORE or
// AFTER the next one, or nearer, counts if the ALIKE requests before it were the plan's, too.
constexpr int64_t ALIKE = 4, BEFORE = 4, AFTER = 16;

// Returns the plan's entry that the last of `seen` is, or -1.
int64_t matching_entry() {
  int64_t n = sizes.size(), end = std::min(cursor + AFTER, n);
  if (cursor < n && sizes[cursor] == seen.back()) return cursor;
  if (static_cast<int64_t>(seen.size()) <= ALIKE) return -1;
  for (int64_t k = std::max(cursor - BEFORE, ALIKE); k < end; ++k)
    if (std::equal(seen.end() - ALIKE - 1, seen.end(), sizes.begin() + k - ALIKE)) return k;
  return -1;
}

// Returns a request's planned address, or none, and counts which: PyTorch is to serve it. In
// REPLAY, under the guard.
char* planned_address(int64_t size) {
  int64_t rounded = (size + align - 1) / align * align;
  seen.push_back(rounded);
  int64_t k = matching_entry();
  if (k >= 0) cursor = k + 1;
  int64_t begin = k < 0 ? -1 : offsets[k];
  int64_t end = begin + rounded;
  auto above = live.lower_bound(end);
  bool occupied = above != live.begin() && (--above)->second > begin;
  Count met = k < 0 ? UNMATCHED : begin < 0 ? UNPLANNED : occupied ? OCCUPIED : HITS;
  ++counts[met];
  if (met != HITS) return nullptr;
  live[begin] = end;
  return arena + begin;
}
}  // namespace

#ifndef MEMPLAN_CUDA
namespace {
c10::Allocator* native;

void release(void* p) {  // of a block that is planned, or PyTorch's (recorded, raw, oneDNN's)
  std::unique_lock<std::mutex> lock(guard);
  if (live.erase(static_cast<char*>(p) - arena)) return;
  if (mode == RECORD) note_death(reinterpret_cast<int64_t>(p));
  lock.unlock();
  native->raw_deleter()(p);
}

struct Delegate final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    int64_t size = static_cast<int64_t>(n);
    if (mode == IDLE || size < min_bytes) return native->allocate(n);
    std::lock_guard<std::mutex> lock(guard);
    void* p = mode == REPLAY ? planned_address(size) : nullptr;
    if (!p) p = native->raw_allocate(n);
    if (mode == RECORD) note_birth(reinterpret_cast<int64_t>(p), size);
    return {p, p, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override {
    default_copy_data(to, from, n);
  }
} delegate;
}  // namespace

extern "C" void install() {
  native = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&delegate, 255);
}
#else
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/version.h>

// Planned are the requests on one stream, where a block that is freed may be given out again at
// once. What another stream reads or writes must be in use until this one has waited for it, as for
// PyTorch's own blocks without record_stream, which does nothing here.
namespace {
using namespace c10::cuda::CUDACachingAllocator;
c10::DeviceIndex device;
CUDAAllocator* native;

void trace(const TraceEntry& e) {  // PyTorch calls it for all requests and frees, under its lock
  std::lock_guard<std::mutex> lock(guard);
  if (mode != RECORD || e.device_ != device) return;
  int64_t address = static_cast<int64_t>(e.addr_), size = static_cast<int64_t>(e.size_);
  if (e.action_ == TraceEntry::ALLOC && e.stream_ == stream && size >= min_bytes)
    note_birth(address, size);
  else if (e.action_ == TraceEntry::FREE_COMPLETED)
    note_death(address);
}

void release(void* p) {
  std::lock_guard<std::mutex> lock(guard);
  live.erase(static_cast<char*>(p) - arena);
}

// All but allocate is PyTorch's own. PASS(f) makes a class that passes on one function more than
// the class before it: f, of whatever type CUDAAllocator declares.
template <int n>
struct Passed : CUDAAllocator {};
#define PASS(f) PASS_AFTER(__COUNTER__, f)
#define PASS_AFTER(n, f)                                                               \
  template <class Type> struct Pass_##f;                                               \
  template <class Base, class Result, class... Args>                                   \
  struct Pass_##f<Result (Base::*)(Args...)> : Passed<n> {                             \
    Result f(Args... args) override { return native->f(std::forward<Args>(args)...); } \
  };                                                                                   \
  template <> struct Passed<n + 1> : Pass_##f<decltype(&CUDAAllocator::f)> {};
PASS(initialized) PASS(init) PASS(enable) PASS(emptyCache) PASS(name) PASS(raw_alloc)
PASS(raw_alloc_with_stream) PASS(raw_delete) PASS(getBaseAllocation) PASS(getDeviceStats)
PASS(resetAccumulatedStats) PASS(resetPeakStats) PASS(getMemoryFraction) PASS(setMemoryFraction)
PASS(getExpandableSegmentSizes) PASS(cacheInfo) PASS(createOrIncrefPool) PASS(beginAllocateToPool)
PASS(endAllocateToPool) PASS(releasePool) PASS(getPoolUseCount) PASS(setNoSplit) PASS(setUseOnOOM)
PASS(checkPoolLiveAllocations) PASS(getCheckpointState) PASS(setCheckpointPoolState)
PASS(shareIpcHandle) PASS(getIpcDevPtr) PASS(enablePeerAccess) PASS(memcpyAsync)
PASS(isHistoryEnabled) PASS(recordHistory) PASS(snapshot) PASS(recordAnnotation)
PASS(pushCompileContext) PASS(popCompileContext) PASS(setUserMetadata) PASS(getUserMetadata)
PASS(attachOutOfMemoryObserver) PASS(attachAllocatorTraceTracker)
#if TORCH_VERSION_MINOR >= 13
PASS(markCaptureBegin) PASS(markCaptureEnd) PASS(getContextForPointer)
PASS(attachOomRejectionObserver) PASS(allocateWithAddress)
#endif

struct Delegate final : Passed<__COUNTER__> {
  c10::DataPtr allocate(size_t n) override {
    int64_t size = static_cast<int64_t>(n);
    if (mode == REPLAY && size >= min_bytes) {
      auto now = c10::cuda::getCurrentCUDAStream();
      std::lock_guard<std::mutex> lock(guard);
      bool planned = mode == REPLAY && now.stream() == stream && now.device_index() == device;
      if (char* p = planned ? planned_address(size) : nullptr)
        return {p, p, &release, c10::Device(c10::DeviceType::CUDA, device)};
    }
    return native->allocate(n);
  }
  void copy_data(void* to, const void* from, size_t n) const override {
    native->copy_data(to, from, n);
  }
  bool isEnabled() const override { return native->isEnabled(); }
  void recordStream(const c10::DataPtr& p, c10::cuda::CUDAStream user) override {
    native->recordStream(p, user);
  }
} delegate;
}  // namespace

extern "C" void install() {  // after CUDA has started, on its current device
  device = c10::cuda::current_device();
  native = get();
  native->attachAllocatorTraceTracker(&trace);
  allocator.store(&delegate);
  c10::SetAllocator(c10::DeviceType::CUDA, &delegate, 255);
}
#endif

extern "C" {
void begin(int which, int smallest, int alignment, void* planned_stream) {
  std::lock_guard<std::mutex> lock(guard);
  mode = which;
  stream = planned_stream;
  min_bytes = smallest;
  align = alignment;
  events = cursor = 0;
  counts = {};
  requests.clear();
  alive.clear();
  seen.clear();
}
int end() {  // the number of recorded requests
  std::lock_guard<std::mutex> lock(guard);
  mode = IDLE;
  return requests.size();
}
int now() { return events; }  // so far: where a mark falls
const Request* recorded() { return requests.data(); }
const int64_t* counted() { return counts.data(); }
int load(void* base, const int64_t* plan, int n) {  // the number of blocks that are in the way
  std::lock_guard<std::mutex> lock(guard);
  if (live.empty()) {
    arena = static_cast<char*>(base);
    sizes.assign(plan, plan + n);
    offsets.assign(plan + n, plan + 2 * n);
  }
  return live.size();
}
}
