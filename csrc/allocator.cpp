// The allocator of replay.py. It stands in front of PyTorch's own allocator, and has three modes:
//
//     IDLE      pass every request on to PyTorch
//     RECORD    pass it on, and note its size, its birth and its death
//     REPLAY    serve it at its planned address in the arena, if it is in the plan and no live
//               tensor has these addresses; else pass it on
//
// In a replay, request number n should be number n of the plan. If a step leaves its plan, requests
// are matched again by the sizes of the requests before them (matching_entry). A wrong plan costs
// memory, but never gives a wrong number: no request gets addresses that are in use.
//
// The file has a common part, then a part for CPUs and one for GPUs (MEMPLAN_CUDA), which plug the
// allocator into PyTorch, then the functions that replay.py calls.
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
// A request of the recorded step. Times are numbers of events, births and deaths alike; died is -1
// until the memory is freed.
struct Request { int64_t born, died, size; };
std::mutex guard;  // of all that follows
std::vector<Request> requests;  // of the recorded step, in the order of births
std::map<int64_t, size_t> alive;  // of the recorded step: address -> index in requests
std::vector<int64_t> sizes, offsets;  // the plan, by request; offset -1: it outlives the step
std::vector<int64_t> seen;  // sizes of the replayed step's requests so far, rounded up to align
std::map<int64_t, int64_t> live;  // parts of the arena that are in use: first offset -> end
std::atomic<int64_t> events;  // of the step so far
int64_t min_bytes, align;  // smaller requests are not planned; sizes are multiples of align
// What became of a replay's requests. HITS got their planned address. UNPLANNED ones outlive the
// step. UNMATCHED ones are not in the plan. OCCUPIED ones are, but their addresses are in use.
enum Count { HITS, UNPLANNED, UNMATCHED, OCCUPIED };
std::array<int64_t, 4> counts;
int64_t cursor;  // index of the plan's entry that should be requested next
char* arena;  // where offset 0 of the plan lies
void* stream;  // the CUDA stream whose requests are recorded and served

void note_birth(int64_t address, int64_t size) {
  alive[address] = requests.size();
  requests.push_back({events++, -1, size});
}

void note_death(int64_t address) {
  auto request = alive.find(address);
  if (request == alive.end()) return;  // smaller than min_bytes, or requested before the step
  requests[request->second].died = events++;
  alive.erase(request);
}

// If a step leaves its plan (it skips a request, say), one size is not enough to find back, because
// sizes repeat. So an entry matches only if the ALIKE requests before it had the plan's sizes, too.
// The entries from cursor - BEFORE to cursor + AFTER - 1 are compared.
constexpr int64_t ALIKE = 4, BEFORE = 4, AFTER = 16;

// Returns the index of the plan's entry that the last request, seen.back(), matches, or -1.
int64_t matching_entry() {
  int64_t n = sizes.size(), end = std::min(cursor + AFTER, n);
  if (cursor < n && sizes[cursor] == seen.back()) return cursor;
  if (static_cast<int64_t>(seen.size()) <= ALIKE) return -1;
  for (int64_t k = std::max(cursor - BEFORE, ALIKE); k < end; ++k)
    if (std::equal(seen.end() - ALIKE - 1, seen.end(), sizes.begin() + k - ALIKE)) return k;
  return -1;
}

// Returns a request's planned address, or nullptr if PyTorch is to serve it, and counts which. The
// caller is in REPLAY and holds the guard.
char* planned_address(int64_t size) {
  int64_t rounded = (size + align - 1) / align * align;
  seen.push_back(rounded);
  int64_t k = matching_entry();
  if (k >= 0) cursor = k + 1;
  int64_t begin = k < 0 ? -1 : offsets[k];
  int64_t end = begin + rounded;
  // the last block in use that begins below `end` is the only one that can reach over `begin`
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

// Frees a block: one that lies in the arena, or one of PyTorch's. Of PyTorch's it gets those that
// were recorded, and those that are freed by raw_deleter, as oneDNN does.
void release(void* p) {
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

// Only the requests of one stream are planned, because a block that is freed may be given out again
// at once, which is right in the order of one stream. A block that another stream reads or writes
// must not be freed until the planned stream has waited for that stream. (The same holds for
// PyTorch's own blocks without record_stream. record_stream does nothing for planned blocks.)
namespace {
using namespace c10::cuda::CUDACachingAllocator;
c10::DeviceIndex device;
CUDAAllocator* native;

// Records. PyTorch calls it for all requests and frees, and holds the lock of its allocator.
void trace(const TraceEntry& e) {
  std::lock_guard<std::mutex> lock(guard);
  if (mode != RECORD || e.device_ != device) return;
  int64_t address = static_cast<int64_t>(e.addr_), size = static_cast<int64_t>(e.size_);
  if (e.action_ == TraceEntry::ALLOC && e.stream_ == stream && size >= min_bytes)
    note_birth(address, size);
  else if (e.action_ == TraceEntry::FREE_COMPLETED)
    note_death(address);
}

// Frees a planned block. PyTorch frees its own.
void release(void* p) {
  std::lock_guard<std::mutex> lock(guard);
  live.erase(static_cast<char*>(p) - arena);
}

// All functions but `allocate` go to PyTorch's allocator. PASS(f) makes a class that inherits from
// the class of the PASS before it, and passes on one function more: f, with the type that
// CUDAAllocator declares. Passed<n> is the class before PASS number n.
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

// Plans for the current device. CUDA must have been initialised.
extern "C" void install() {
  device = c10::cuda::current_device();
  native = get();
  native->attachAllocatorTraceTracker(&trace);
  allocator.store(&delegate);
  c10::SetAllocator(c10::DeviceType::CUDA, &delegate, 255);
}
#endif

// What replay.py calls.
extern "C" {
// Begins to record or to replay a step.
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
// Ends the step. Returns how many requests were recorded.
int end() {
  std::lock_guard<std::mutex> lock(guard);
  mode = IDLE;
  return requests.size();
}
// Returns the number of events so far: the time of a mark.
int now() { return events; }
const Request* recorded() { return requests.data(); }
const int64_t* counted() { return counts.data(); }
// Takes a plan of n requests (n sizes, then n offsets) for the arena at `base`, unless parts of the
// last arena are in use. Returns how many are; 0: the plan is taken.
int load(void* base, const int64_t* plan, int n) {
  std::lock_guard<std::mutex> lock(guard);
  if (live.empty()) {
    arena = static_cast<char*>(base);
    sizes.assign(plan, plan + n);
    offsets.assign(plan + n, plan + 2 * n);
  }
  return live.size();
}
}
