// The allocator of replay.py. It stands in front of PyTorch's own allocator, and has three modes:
//
//     IDLE      pass every request on to PyTorch
//     RECORD    pass each request on, and note its size, its birth and its death
//     REPLAY    serve each request at its planned address in the arena, if it is in the plan and
//               no live tensor has these addresses; else pass it on
//
// In a replay, request number n should be number n of the plan. If a step leaves its plan, requests
// are matched again by the sizes of the requests before them (matching_entry). A wrong plan costs
// memory, but it never gives a wrong result, because no request gets addresses that are in use.
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
// A request of the recorded step. `born` and `died` are times: the number of births and deaths that
// came before. `died` is -1 until the memory is freed.
struct Request { int64_t born, died, size; };
std::mutex guard;  // guards all variables below
std::vector<Request> requests;  // the recorded step's requests, in the order of births
std::map<int64_t, size_t> recorded_alive;  // memory not yet freed: address -> index in `requests`
// The plan: for each request its size and its offset in the arena. The offset is -1 if the request
// outlives the step.
std::vector<int64_t> sizes, offsets;
std::vector<int64_t> replayed_sizes;  // sizes of the replayed step's requests so far, rounded up
std::map<int64_t, int64_t> arena_in_use;  // the arena's blocks in use: first offset -> end
std::atomic<int64_t> events;  // how many births and deaths the step has had so far
int64_t min_bytes;  // smaller requests are neither recorded nor planned
int64_t align;  // planned sizes are rounded up to multiples of it
// How a replay's requests ended. HITS got their planned address. UNPLANNED ones outlive the step.
// UNMATCHED ones are not in the plan. OCCUPIED ones are, but their addresses are in use.
enum Outcome { HITS, UNPLANNED, UNMATCHED, OCCUPIED };
std::array<int64_t, 4> counts;  // requests of the replayed step by outcome
int64_t cursor;  // index of the plan's entry that should be requested next
char* arena;  // where offset 0 of the plan lies
void* stream;  // the CUDA stream whose requests are recorded and served

void note_birth(int64_t address, int64_t size) {
  recorded_alive[address] = requests.size();
  requests.push_back({events++, -1, size});
}

void note_death(int64_t address) {
  auto request = recorded_alive.find(address);
  // memory that was not recorded: smaller than min_bytes, or requested before the step
  if (request == recorded_alive.end()) return;
  requests[request->second].died = events++;
  recorded_alive.erase(request);
}

// A step may leave its plan, for example because it skips a request. Then the size of one request
// does not say where in the plan the step is, because sizes repeat. So an entry matches only if the
// CONTEXT requests before it had the plan's sizes, too. The entries from cursor - BEFORE to
// cursor + AFTER - 1 are compared.
constexpr int64_t CONTEXT = 4, BEFORE = 4, AFTER = 16;

// Returns the index of the plan's entry that the last request matches, or -1 if none matches. The
// last request's size is replayed_sizes.back().
int64_t matching_entry() {
  int64_t n = sizes.size(), end = std::min(cursor + AFTER, n);
  if (cursor < n && sizes[cursor] == replayed_sizes.back()) return cursor;
  if (static_cast<int64_t>(replayed_sizes.size()) <= CONTEXT) return -1;
  auto recent = replayed_sizes.end() - CONTEXT - 1;
  for (int64_t entry = std::max(cursor - BEFORE, CONTEXT); entry < end; ++entry)
    if (std::equal(recent, replayed_sizes.end(), sizes.begin() + entry - CONTEXT)) return entry;
  return -1;
}

// Returns a request's planned address, or nullptr if PyTorch should serve the request. Counts the
// outcome. The caller has seen that the mode is REPLAY, and holds the guard.
char* planned_address(int64_t size) {
  int64_t rounded = (size + align - 1) / align * align;
  replayed_sizes.push_back(rounded);
  int64_t entry = matching_entry();
  if (entry >= 0) cursor = entry + 1;
  int64_t begin = entry < 0 ? -1 : offsets[entry];
  int64_t end = begin + rounded;

  // Blocks in use do not overlap. So if any of them overlaps [begin, end), the last one that begins
  // below `end` does.
  auto above = arena_in_use.lower_bound(end);
  bool occupied = above != arena_in_use.begin() && (--above)->second > begin;
  Outcome outcome = entry < 0 ? UNMATCHED : begin < 0 ? UNPLANNED : occupied ? OCCUPIED : HITS;
  ++counts[outcome];
  if (outcome != HITS) return nullptr;
  arena_in_use[begin] = end;
  return arena + begin;
}
}  // namespace

#ifndef MEMPLAN_CUDA
namespace {
c10::Allocator* native;

// Frees a block of the arena, or one of PyTorch's. PyTorch's blocks come here if allocate() below
// served them while a step was recorded or replayed, or if a library frees them by raw_deleter, as
// oneDNN does.
void release(void* p) {
  std::unique_lock<std::mutex> lock(guard);
  if (arena_in_use.erase(static_cast<char*>(p) - arena)) return;
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
  c10::SetCPUAllocator(&delegate, 255);  // 255 is the highest priority
}
#else
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/version.h>

// Only the requests of one stream are planned. A block that is freed may be given out again at
// once, and that is right only if the same stream, which works in order, uses it next. A block that
// another stream reads or writes must not be freed until the planned stream has waited for that
// stream. (The same holds for PyTorch's own blocks without record_stream. For planned blocks,
// record_stream does nothing.)
namespace {
using namespace c10::cuda::CUDACachingAllocator;
c10::DeviceIndex device;
CUDAAllocator* native;

// Records a birth or a death. PyTorch calls this function at every request and every free, while it
// holds the lock of its allocator.
void trace(const TraceEntry& e) {
  std::lock_guard<std::mutex> lock(guard);
  if (mode != RECORD || e.device_ != device) return;
  int64_t address = static_cast<int64_t>(e.addr_), size = static_cast<int64_t>(e.size_);
  if (e.action_ == TraceEntry::ALLOC && e.stream_ == stream && size >= min_bytes)
    note_birth(address, size);
  else if (e.action_ == TraceEntry::FREE_COMPLETED)
    note_death(address);
}

// Frees a block of the arena. PyTorch frees its own blocks.
void release(void* p) {
  std::lock_guard<std::mutex> lock(guard);
  arena_in_use.erase(static_cast<char*>(p) - arena);
}

// All functions except `allocate` go to PyTorch's allocator. Each PASS(f) makes a class that
// inherits from the class of the PASS before it, and that passes on one more function: f, with the
// type that CUDAAllocator declares. Passed<n> is the class before PASS number n.
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

// Puts this allocator in front of PyTorch's for the current device. CUDA must be initialised.
extern "C" void install() {
  device = c10::cuda::current_device();
  native = get();
  native->attachAllocatorTraceTracker(&trace);
  allocator.store(&delegate);
  c10::SetAllocator(c10::DeviceType::CUDA, &delegate, 255);
}
#endif

// The functions that replay.py calls.
extern "C" {
// Begins to record or to replay a step. which: RECORD or REPLAY. smallest: min_bytes above.
void begin(int which, int smallest, int alignment, void* planned_stream) {
  std::lock_guard<std::mutex> lock(guard);
  mode = which;
  stream = planned_stream;
  min_bytes = smallest;
  align = alignment;
  events = cursor = 0;
  counts = {};
  requests.clear();
  recorded_alive.clear();
  replayed_sizes.clear();
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
// Takes a plan of n requests (n sizes, then n offsets) for the arena at `base`, unless blocks of
// the last arena are in use. Returns the number of these blocks: 0 means that the plan was taken.
int load(void* base, const int64_t* plan, int n) {
  std::lock_guard<std::mutex> lock(guard);
  if (arena_in_use.empty()) {
    arena = static_cast<char*>(base);
    sizes.assign(plan, plan + n);
    offsets.assign(plan + n, plan + 2 * n);
  }
  return arena_in_use.size();
}
}
