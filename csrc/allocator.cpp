// memplan.py's allocator. It delegates to PyTorch's own, and, in a step, records its requests or
// serves them from an arena at planned offsets. A request goes to PyTorch if it is not the next one
// of the plan, nor one near it that follows the same requests, or if its addresses are in use: a
// wrong plan costs memory, never a number.
#include <c10/core/CPUAllocator.h>
#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {
enum Mode { IDLE = 0, RECORD = 1, REPLAY = 2 };  // or both
std::atomic<int> mode{IDLE};
struct Event { int64_t request, size, address; };  // size -1: it was freed
struct Entry { int64_t size, offset; };  // offset -1: it outlives the step, PyTorch's
struct Block { int64_t end, request, session; };
std::mutex guard;
std::vector<Event> events;
std::vector<Entry> plan;
std::vector<int64_t> seen;  // sizes of the step's requests so far
std::map<int64_t, Block> live;  // planned blocks in use, by where they begin
int64_t requests, min_bytes, align, session;
// Requests served (hits), that outlive the step (unplanned), that the plan does not have
// (unmatched), whose addresses are in use (occupied); bytes of the first, and of all.
enum Count { HITS, UNPLANNED, UNMATCHED, OCCUPIED, HIT_BYTES, ALL_BYTES, NUM_COUNTS };
int64_t counts[NUM_COUNTS];
int64_t cursor;  // the plan's next entry
char* arena;

void free_planned(void* context) {
  std::lock_guard<std::mutex> lock(guard);
  auto block = live.find(static_cast<char*>(context) - arena);
  if ((mode & RECORD) && block->second.session == session)
    events.push_back({block->second.request, -1, 0});
  live.erase(block);
}

// Sizes repeat, so one alone tells little where a step leaves its plan: an entry so far BEFORE or
// AFTER the next one, or nearer, counts if the ALIKE requests before it were the plan's, too.
constexpr int ALIKE = 4, BEFORE = 4, AFTER = 16;

// Returns the plan's entry that a request of this size is, or -1.
int64_t matching_entry(int64_t size) {
  auto follows = [size](int64_t k) {  // what has been requested: the same as before entry k
    return plan[k].size == size && static_cast<int64_t>(seen.size()) >= ALIKE && std::equal(
        seen.end() - ALIKE, seen.end(), plan.begin() + k - ALIKE,
        [](int64_t a, const Entry& b) { return a == b.size; });
  };
  int64_t n = plan.size(), end = std::min<int64_t>(cursor + AFTER, n);
  if (cursor < n && plan[cursor].size == size) return cursor;
  for (int64_t k = std::max<int64_t>(cursor - BEFORE, ALIKE); k < end; ++k)
    if (follows(k)) return k;
  return -1;
}

// Returns a request's planned address, or none: PyTorch is to serve it. In REPLAY, under the guard.
char* planned_address(int64_t size) {
  counts[ALL_BYTES] += size;
  int64_t rounded = (std::max<int64_t>(size, 1) + align - 1) / align * align;
  int64_t k = matching_entry(rounded);
  seen.push_back(rounded);
  if (k < 0) {
    ++counts[UNMATCHED];
    return nullptr;
  }
  cursor = k + 1;
  int64_t begin = plan[k].offset;
  int64_t end = begin + rounded;
  if (begin < 0) {
    ++counts[UNPLANNED];
    return nullptr;
  }
  auto after = live.lower_bound(begin);
  bool occupied = (after != live.end() && after->first < end) ||
                  (after != live.begin() && std::prev(after)->second.end > begin);
  if (occupied) {
    ++counts[OCCUPIED];
    return nullptr;
  }
  live[begin] = {end, requests, session};
  if (mode & RECORD)
    events.push_back({requests++, size, reinterpret_cast<int64_t>(arena + begin)});
  ++counts[HITS];
  counts[HIT_BYTES] += size;
  return arena + begin;
}
}  // namespace

#ifndef MEMPLAN_CUDA
namespace {
struct Recorded { c10::DataPtr inner; int64_t request, session; };
std::unordered_map<void*, Recorded> recorded_blocks;
c10::Allocator* native;

void release(void* p) {  // of a block that is recorded, planned, or PyTorch's (raw, oneDNN's)
  c10::DataPtr gone;  // when the lock is
  std::unique_lock<std::mutex> lock(guard);
  if (auto r = recorded_blocks.find(p); r != recorded_blocks.end()) {
    if ((mode & RECORD) && r->second.session == session)
      events.push_back({r->second.request, -1, 0});
    gone = std::move(r->second.inner);
    recorded_blocks.erase(r);
    return;
  }
  bool planned = live.count(static_cast<char*>(p) - arena);
  lock.unlock();
  planned ? free_planned(p) : native->raw_deleter()(p);
}

struct Delegate final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    int64_t size = static_cast<int64_t>(n);
    {
      std::lock_guard<std::mutex> lock(guard);
      if ((mode & REPLAY) && size >= min_bytes)
        if (char* p = planned_address(size))
          return {p, p, &release, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DataPtr inner = native->allocate(n);
    std::lock_guard<std::mutex> lock(guard);
    if (!(mode & RECORD) || size < min_bytes) return inner;
    void* p = inner.get();
    events.push_back({requests, size, reinterpret_cast<int64_t>(p)});
    recorded_blocks[p] = {std::move(inner), requests++, session};
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
c10::DeviceIndex device;
std::unordered_map<int64_t, int64_t> born;  // address: request
CUDAAllocator* native;

void trace(const TraceEntry& e) {  // PyTorch calls it for all requests and frees, under its lock
  std::lock_guard<std::mutex> lock(guard);
  if (!(mode & RECORD) || e.device_ != device) return;
  int64_t address = static_cast<int64_t>(e.addr_), size = static_cast<int64_t>(e.size_);
  if (e.action_ == TraceEntry::ALLOC && e.stream_ == stream && size >= min_bytes) {
    born[address] = requests;
    events.push_back({requests++, size, address});
  } else if (e.action_ == TraceEntry::FREE_COMPLETED) {
    auto found = born.find(address);
    if (found == born.end()) return;
    events.push_back({found->second, -1, 0});
    born.erase(found);
  }
}

#define PASS(type, name, params, args) \
  type name params override { return native->name args; }
struct Delegate final : CUDAAllocator {
  c10::DataPtr allocate(size_t n) override {
    if ((mode & REPLAY) && static_cast<int64_t>(n) >= min_bytes) {
      auto now = c10::cuda::getCurrentCUDAStream();
      std::lock_guard<std::mutex> lock(guard);
      if ((mode & REPLAY) && now.stream() == stream && now.device_index() == device)
        if (char* p = planned_address(static_cast<int64_t>(n)))
          return {p, p, &free_planned, c10::Device(c10::DeviceType::CUDA, device)};
    }
    return native->allocate(n);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // raw blocks: raw_alloc
  void copy_data(void* to, const void* from, size_t n) const override {
    native->copy_data(to, from, n);
  }
  PASS(bool, initialized, (), ())
  PASS(void, emptyCache, (MempoolId_t id), (id))
  PASS(CachingDeviceAllocator::DeviceStats, getDeviceStats, (c10::DeviceIndex d), (d))
  PASS(void, resetAccumulatedStats, (c10::DeviceIndex d), (d))
  PASS(void, resetPeakStats, (c10::DeviceIndex d), (d))
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
    return native->getMemoryInfo(d);
  }
  PASS(void*, raw_alloc, (size_t n), (n))
  PASS(void*, raw_alloc_with_stream, (size_t n, cudaStream_t s), (n, s))
  PASS(void, raw_delete, (void* p), (p))
  PASS(void, init, (int count), (count))
  PASS(double, getMemoryFraction, (c10::DeviceIndex d), (d))
  PASS(void, setMemoryFraction, (double f, c10::DeviceIndex d), (f, d))
  PASS(std::vector<StreamSegmentSize>, getExpandableSegmentSizes, (c10::DeviceIndex d), (d))
  PASS(void, enable, (bool on), (on))
  bool isEnabled() const override { return native->isEnabled(); }
  PASS(void, cacheInfo, (c10::DeviceIndex d, size_t* n), (d, n))
  PASS(void*, getBaseAllocation, (void* p, size_t* n), (p, n))
  PASS(void, recordStream, (const DataPtr& p, CUDAStream s), (p, s))
  PASS(SnapshotInfo, snapshot, (MempoolId_t id, bool traces), (id, traces))
  PASS(void, beginAllocateToPool, (c10::DeviceIndex d, MempoolId_t id,
       std::function<bool(cudaStream_t)> f), (d, id, std::move(f)))
  PASS(void, endAllocateToPool, (c10::DeviceIndex d, MempoolId_t id), (d, id))
  PASS(void, releasePool, (c10::DeviceIndex d, MempoolId_t id), (d, id))
  PASS(int, getPoolUseCount, (c10::DeviceIndex d, MempoolId_t id), (d, id))
  PASS(void, createOrIncrefPool, (c10::DeviceIndex d, MempoolId_t id,
       std::shared_ptr<CUDAAllocator> a), (d, id, std::move(a)))
  PASS(void, setUseOnOOM, (c10::DeviceIndex d, MempoolId_t id, bool on), (d, id, on))
  PASS(void, setNoSplit, (c10::DeviceIndex d, MempoolId_t id), (d, id))
  PASS(bool, checkPoolLiveAllocations, (c10::DeviceIndex d, MempoolId_t id,
       const std::unordered_set<void*>& expected), (d, id, expected))
  PASS(ShareableHandle, shareIpcHandle, (void* p), (p))
  PASS(std::shared_ptr<void>, getIpcDevPtr, (std::string handle), (std::move(handle)))
  PASS(bool, isHistoryEnabled, (), ())
  PASS(void, recordHistory, (bool on, CreateContextFn context, size_t most, RecordContext when,
       bool clear, const std::vector<std::string>& skip), (on, context, most, when, clear, skip))
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& x) override {
    native->recordAnnotation(x);
  }
  PASS(void, pushCompileContext, (std::string& x), (x))
  PASS(void, popCompileContext, (), ())
  PASS(void, setUserMetadata, (const std::string& x), (x))
  PASS(std::string, getUserMetadata, (), ())
  PASS(void, attachOutOfMemoryObserver, (OutOfMemoryObserver x), (std::move(x)))
  PASS(void, attachAllocatorTraceTracker, (AllocatorTraceTracker x), (std::move(x)))
  PASS(void, enablePeerAccess, (c10::DeviceIndex a, c10::DeviceIndex b), (a, b))
  PASS(cudaError_t, memcpyAsync, (void* to, int d, const void* from, int e, size_t n,
       cudaStream_t s, bool peer), (to, d, from, e, n, s, peer))
  PASS(std::shared_ptr<AllocatorState>, getCheckpointState, (c10::DeviceIndex d, MempoolId_t id),
       (d, id))
  PASS(CheckpointDelta, setCheckpointPoolState, (c10::DeviceIndex d,
       std::shared_ptr<AllocatorState> x), (d, std::move(x)))
  PASS(std::string, name, (), ())
#if TORCH_VERSION_MINOR >= 13
  PASS(void, markCaptureBegin, (c10::DeviceIndex d), (d))
  PASS(void, markCaptureEnd, (c10::DeviceIndex d), (d))
  PASS(std::shared_ptr<GatheredContext>, getContextForPointer, (const void* p), (p))
  PASS(void, attachOomRejectionObserver, (OomRejectionObserver x), (std::move(x)))
  PASS(DataPtr, allocateWithAddress, (size_t n, void* p), (n, p))
#endif
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
void begin(int which, int64_t smallest, int64_t step) {
  std::lock_guard<std::mutex> lock(guard);
  mode = which;
  min_bytes = smallest;
  align = step;
  ++session;
  requests = 0;
  cursor = 0;
  std::fill(counts, counts + NUM_COUNTS, 0);
  events.clear();
  seen.clear();
#ifdef MEMPLAN_CUDA
  c10::cuda::CUDACachingAllocator::born.clear();
#endif
}
int64_t end() {
  std::lock_guard<std::mutex> lock(guard);
  mode = IDLE;
  return static_cast<int64_t>(events.size());
}
int64_t num_events() {  // so far: where a mark falls
  std::lock_guard<std::mutex> lock(guard);
  return static_cast<int64_t>(events.size());
}
const Event* recorded() { return events.data(); }
const int64_t* counted() { return counts; }
int64_t load(void* base, const Entry* entries, int64_t n) {
  std::lock_guard<std::mutex> lock(guard);
  if (!live.empty()) return static_cast<int64_t>(live.size());  // the last arena is in use
  arena = static_cast<char*>(base);
  plan.assign(entries, entries + n);
  return 0;
}
}
