// memplan.py's allocator. It delegates to PyTorch's own, and, in a step, records its requests or
// serves them from an arena at planned offsets. A request goes to PyTorch if it is not the next one
// of the plan, nor one near it that follows the same requests, or if its addresses are in use: a
// wrong plan costs memory, never a number.
#include <c10/core/CPUAllocator.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {
enum Mode { IDLE = 0, RECORD = 1, REPLAY = 2 };
std::atomic<int> mode{IDLE};
struct Request { int64_t born, died, size; };  // counted in events; died: -1 while it is alive
struct Entry { int64_t size, offset; };  // offset -1: it outlives the step, PyTorch's
std::mutex guard;
std::vector<Request> requests;  // of the recorded step
std::unordered_map<int64_t, size_t> alive;  // of the recorded step: address, number of the request
std::vector<Entry> plan;
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
  int64_t n = plan.size(), end = std::min(cursor + AFTER, n);
  if (cursor < n && plan[cursor].size == seen.back()) return cursor;
  if (static_cast<int64_t>(seen.size()) <= ALIKE) return -1;
  for (int64_t k = std::max(cursor - BEFORE, ALIKE); k < end; ++k)
    if (std::equal(seen.end() - ALIKE - 1, seen.end(), plan.begin() + k - ALIKE,
                   [](int64_t size, const Entry& entry) { return size == entry.size; }))
      return k;
  return -1;
}

// Returns a request's planned address, or none, and counts which: PyTorch is to serve it. In
// REPLAY, under the guard.
char* planned_address(int64_t size) {
  int64_t rounded = (size + align - 1) / align * align;
  seen.push_back(rounded);
  int64_t k = matching_entry();
  if (k >= 0) cursor = k + 1;
  int64_t begin = k < 0 ? -1 : plan[k].offset;
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

extern "C" void install(void*) {
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
namespace c10::cuda::CUDACachingAllocator {
namespace {
void* stream;  // whose requests count
DeviceIndex device;
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

using std::string;
using Device = c10::DeviceIndex;
using Pool = MempoolId_t;
using State = std::shared_ptr<AllocatorState>;
using Annotations = std::vector<std::pair<string, string>>;

#define PASS0(type, name) type name() override { return native->name(); }
#define PASS1(type, name, A) \
  type name(A a) override { return native->name(std::forward<A>(a)); }
#define PASS2(type, name, A, B) \
  type name(A a, B b) override { return native->name(std::forward<A>(a), std::forward<B>(b)); }
#define PASS3(type, name, A, B, C) \
  type name(A a, B b, C c) override { return native->name(a, b, std::forward<C>(c)); }
struct Delegate final : CUDAAllocator {  // PyTorch's own, but for allocate
  DataPtr allocate(size_t n) override {
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
  DeleterFnPtr raw_deleter() const override { return nullptr; }  // raw blocks: raw_alloc
  void copy_data(void* to, const void* from, size_t n) const override {
    native->copy_data(to, from, n);
  }
  bool isEnabled() const override { return native->isEnabled(); }
  PASS0(bool, initialized) PASS0(string, name)
  PASS1(void, init, int) PASS1(void, enable, bool) PASS1(void, emptyCache, Pool)
  PASS1(void*, raw_alloc, size_t) PASS2(void*, raw_alloc_with_stream, size_t, cudaStream_t)
  PASS1(void, raw_delete, void*) PASS2(void*, getBaseAllocation, void*, size_t*)
  PASS2(void, recordStream, const DataPtr&, CUDAStream)
  // statistics and limits
  PASS1(CachingDeviceAllocator::DeviceStats, getDeviceStats, Device)
  PASS1(void, resetAccumulatedStats, Device) PASS1(void, resetPeakStats, Device)
  PASS1(double, getMemoryFraction, Device) PASS2(void, setMemoryFraction, double, Device)
  PASS1(std::vector<StreamSegmentSize>, getExpandableSegmentSizes, Device)
  PASS2(void, cacheInfo, Device, size_t*)
  // pools, graphs, other processes and devices
  PASS3(void, createOrIncrefPool, Device, Pool, std::shared_ptr<CUDAAllocator>)
  PASS3(void, beginAllocateToPool, Device, Pool, std::function<bool(cudaStream_t)>)
  PASS2(void, endAllocateToPool, Device, Pool) PASS2(void, releasePool, Device, Pool)
  PASS2(int, getPoolUseCount, Device, Pool) PASS2(void, setNoSplit, Device, Pool)
  PASS3(void, setUseOnOOM, Device, Pool, bool)
  PASS3(bool, checkPoolLiveAllocations, Device, Pool, const std::unordered_set<void*>&)
  PASS2(State, getCheckpointState, Device, Pool)
  PASS2(CheckpointDelta, setCheckpointPoolState, Device, State)
  PASS1(ShareableHandle, shareIpcHandle, void*) PASS1(std::shared_ptr<void>, getIpcDevPtr, string)
  PASS2(void, enablePeerAccess, Device, Device)
  // history
  PASS0(bool, isHistoryEnabled) PASS2(SnapshotInfo, snapshot, Pool, bool)
  PASS1(void, recordAnnotation, const Annotations&)
  PASS1(void, pushCompileContext, string&) PASS0(void, popCompileContext)
  PASS1(void, setUserMetadata, const string&) PASS0(string, getUserMetadata)
  PASS1(void, attachOutOfMemoryObserver, OutOfMemoryObserver)
  PASS1(void, attachAllocatorTraceTracker, AllocatorTraceTracker)
#if TORCH_VERSION_MINOR >= 13
  PASS1(void, markCaptureBegin, Device) PASS1(void, markCaptureEnd, Device)
  PASS1(std::shared_ptr<GatheredContext>, getContextForPointer, const void*)
  PASS1(void, attachOomRejectionObserver, OomRejectionObserver)
  PASS2(DataPtr, allocateWithAddress, size_t, void*)
#endif
  void recordHistory(bool on, CreateContextFn context, size_t most, RecordContext when, bool clear,
                     const std::vector<string>& skip) override {
    native->recordHistory(on, context, most, when, clear, skip);
  }
  cudaError_t memcpyAsync(void* to, int d, const void* from, int e, size_t n, cudaStream_t s,
                          bool peer) override {
    return native->memcpyAsync(to, d, from, e, n, s, peer);
  }
} delegate;
}  // namespace
}  // namespace c10::cuda::CUDACachingAllocator

extern "C" void install(void* which) {  // after CUDA has started, on its current device
  namespace caching = c10::cuda::CUDACachingAllocator;
  caching::stream = which;
  caching::device = c10::cuda::current_device();
  if (caching::native) return;
  caching::native = caching::get();
  caching::native->attachAllocatorTraceTracker(&caching::trace);
  caching::allocator.store(&caching::delegate);
  c10::SetAllocator(c10::DeviceType::CUDA, &caching::delegate, 255);
}
#endif

extern "C" {
void begin(int which, int smallest, int alignment) {
  std::lock_guard<std::mutex> lock(guard);
  mode = which;
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
int load(void* base, const Entry* entries, int n) {  // the number of blocks that are in the way
  std::lock_guard<std::mutex> lock(guard);
  if (live.empty()) {
    arena = static_cast<char*>(base);
    plan.assign(entries, entries + n);
  }
  return live.size();
}
}
