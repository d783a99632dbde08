// The searches of memplan.py. All take n buffers as three arrays, start, end and size, with time
// counted from 0 in sections, and a limit in seconds; all set offsets.
//
//   first_fit_by_birth   one sweep over time: each buffer in the lowest gap that is large enough
//   greedy               first fit over a fixed list of orders: in each, one buffer after the other
//                        goes into the lowest (or smallest) gap between those placed
//   pack                 offsets below a capacity, or the proof that there are none: left-justified
//                        depth-first searches that start again and again, in other orders and with
//                        more steps, and give up where the waste at a moment exceeds what the
//                        capacity leaves there
//   search               pack at ever lower capacities, then a local search over orders
//
// Legend: n buffers, i, j; s a section of time, within which nothing is born or dies; [a, b) the
// sections of a buffer; floor[s] the lowest offset for what is still to come.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace {
using std::max, std::min, std::vector;
using Bytes = int64_t;
const Bytes FAR = std::numeric_limits<Bytes>::max() / 4;

using Clock = std::chrono::steady_clock;

Clock::time_point after(double seconds) {
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

struct Buffers {
  int n;
  const int64_t *start, *end, *size;
};

Bytes unit_of(const Buffers& x) {  // all sums of sizes are its multiples
  Bytes unit = 0;
  for (int i = 0; i < x.n; ++i) unit = std::gcd(unit, x.size[i]);
  return unit;
}

vector<Bytes> live_bytes(const Buffers& x) {  // of each section
  vector<Bytes> live(*std::max_element(x.end, x.end + x.n) + 1);
  for (int i = 0; i < x.n; ++i) {
    live[x.start[i]] += x.size[i];
    live[x.end[i]] -= x.size[i];
  }
  std::partial_sum(live.begin(), live.end(), live.begin());
  return live;
}

struct Placed { Bytes offset, top; int64_t start, end; };

// Places each buffer of `order` in the lowest gap between those placed that it overlaps in time (or
// in the smallest gap that is large enough). Offsets that are not -1 stay. Returns false if time
// was up.
bool place_in_order(const Buffers& x, const vector<int>& order, bool best_fit,
                    vector<Bytes>& offset, Clock::time_point deadline) {
  vector<Placed> placed;  // by offset
  placed.reserve(x.n);
  for (int i = 0; i < x.n; ++i)
    if (offset[i] >= 0) placed.push_back({offset[i], offset[i] + x.size[i], x.start[i], x.end[i]});
  auto lower = [](const Placed& a, const Placed& b) { return a.offset < b.offset; };
  std::sort(placed.begin(), placed.end(), lower);
  for (int i : order) {
    if (placed.size() % 64 == 63 && Clock::now() > deadline) return false;
    Bytes size = x.size[i], at = 0, found = -1, smallest = FAR;
    int64_t start = x.start[i], end = x.end[i];
    for (const Placed& p : placed) {
      if (p.start >= end || p.end <= start) continue;
      if (p.offset - at >= size && p.offset - at < smallest) {
        found = at;
        smallest = p.offset - at;
        if (!best_fit) break;
      }
      at = max(at, p.top);
    }
    offset[i] = found < 0 ? at : found;
    Placed now{offset[i], offset[i] + size, start, end};
    placed.insert(std::upper_bound(placed.begin(), placed.end(), now, lower), now);
  }
  return true;
}

Bytes peak_of(const Buffers& x, const vector<Bytes>& offset) {
  Bytes peak = 0;
  for (int i = 0; i < x.n; ++i) peak = max(peak, offset[i] + x.size[i]);
  return peak;
}

struct Problem {
  int n, sections;
  vector<int> a, b;
  vector<Bytes> size, total;         // total: of a section
  vector<vector<int>> alive, overlaps;  // in a section; of a buffer
  Bytes capacity;

  Problem(const Buffers& x, Bytes unit, Bytes capacity)
      : n(x.n), a(n), b(n), size(n), overlaps(n), capacity(capacity) {
    vector<int64_t> times(x.start, x.start + n);
    times.insert(times.end(), x.end, x.end + n);
    std::sort(times.begin(), times.end());
    times.erase(std::unique(times.begin(), times.end()), times.end());
    sections = static_cast<int>(times.size()) - 1;
    total.resize(sections);
    alive.resize(sections);
    auto at = [&](int64_t t) {
      return static_cast<int>(std::lower_bound(times.begin(), times.end(), t) - times.begin());
    };
    for (int i = 0; i < n; ++i) {
      a[i] = at(x.start[i]);
      b[i] = at(x.end[i]);
      size[i] = x.size[i] / unit;
      for (int s = a[i]; s < b[i]; ++s) {
        alive[s].push_back(i);
        total[s] += size[i];
      }
    }
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < n; ++j)
        if (i != j && a[i] < b[j] && a[j] < b[i]) overlaps[i].push_back(j);
  }
  bool twins(int i, int j) const { return a[i] == a[j] && b[i] == b[j] && size[i] == size[j]; }
};

using Clock = std::chrono::steady_clock;

struct Search {
  const Problem& p;
  vector<Bytes> offset;  // -1: still to come
  vector<int> rank;      // of buffers, in the order that is tried first
  int64_t steps = 0, most;
  Clock::time_point end;
  int from = 0, to = 0;  // the sections that the last failure is about
  Search(const Problem& p, vector<int> rank, int64_t most, Clock::time_point end)
      : p(p), offset(p.n, -1), rank(std::move(rank)), most(most), end(end) {}
  bool over() {  // once true, always
    if ((steps % 64 == 0 || p.n > 200) && Clock::now() > end) most = -1;  // large: slow steps
    return steps > most;
  }
  bool failed(int lo, int hi) { return from = lo, to = hi, false; }
};

// Buffers in the order of their offsets: what comes next lies as low as what is placed lets it,
// and never below what came before. One that some other could still go below in whole is skipped:
// the other would have come before. Where nothing that is still to come crosses a border between
// sections, both sides are solved alone. `jump`: a failure about other sections is not repaired by
// another choice here. Most often so, but not always: only without it, not to find offsets proves
// that there are none.
struct Ascending : Search {
  vector<Bytes> lowest, left;  // of a buffer, on what is placed; of a section, still to come
  vector<std::pair<int, Bytes>> trail;  // of `lowest`, to undo
  bool jump;
  Ascending(const Problem& p, vector<int> rank, int64_t most, Clock::time_point end, bool jump)
      : Search(p, std::move(rank), most, end), lowest(p.n), left(p.total), jump(jump) {}

  bool run() {
    vector<int> all(p.n);
    std::iota(all.begin(), all.end(), 0);
    std::sort(all.begin(), all.end(), [&](int i, int j) { return p.a[i] < p.a[j]; });
    return independent(all, -1, -1);
  }

  void lift(int i) {  // i was placed: what lives with it lies above
    for (int s = p.a[i]; s < p.b[i]; ++s) left[s] -= p.size[i];
    for (int j : p.overlaps[i])
      if (offset[j] < 0 && lowest[j] < offset[i] + p.size[i])
        trail.push_back({j, lowest[j]}), lowest[j] = offset[i] + p.size[i];
  }
  void take_back(int i, size_t mark) {
    for (int s = p.a[i]; s < p.b[i]; ++s) left[s] += p.size[i];
    offset[i] = -1;
    for (; trail.size() > mark; trail.pop_back()) lowest[trail.back().first] = trail.back().second;
  }

  bool independent(const vector<int>& todo, Bytes last, int last_rank) {  // todo: by birth
    vector<vector<int>> parts;
    int end = -1;
    for (int i : todo) {
      if (p.a[i] >= end) parts.emplace_back();
      parts.back().push_back(i), end = max(end, p.b[i]);
    }
    std::stable_sort(parts.begin(), parts.end(),
                     [](auto& x, auto& y) { return x.size() < y.size(); });
    size_t mark = trail.size();
    for (size_t k = 0; k < parts.size(); ++k)
      if (!together(parts[k], last, last_rank)) {
        for (size_t done = 0; done < k; ++done)
          for (int i : parts[done]) take_back(i, mark);
        return false;
      }
    return true;
  }

  bool together(const vector<int>& todo, Bytes last, int last_rank) {
    if (++steps, over()) return false;
    auto may = [&](int i) {
      return lowest[i] > last || (lowest[i] == last && rank[i] > last_rank);
    };
    int lo = p.a[todo[0]], hi = lo;
    Bytes top = FAR;
    for (int i : todo) hi = max(hi, p.b[i]), top = min(top, lowest[i] + p.size[i]);
    vector<Bytes> floor(hi - lo, FAR);
    vector<int> next;
    for (int i : todo) {
      Bytes at = lowest[i];
      if (may(i)) {
        if (at < top) next.push_back(i);
      } else {  // only above something that is still to come
        at = FAR;
        for (int j : p.overlaps[i])
          if (offset[j] < 0) at = min(at, max(lowest[j], last) + p.size[j]);
      }
      if (at + p.size[i] > p.capacity) return failed(p.a[i], p.b[i]);
      for (int s = p.a[i]; s < p.b[i]; ++s) floor[s - lo] = min(floor[s - lo], at);
    }
    for (int s = lo; s < hi; ++s)
      if (floor[s - lo] < FAR && floor[s - lo] + left[s] > p.capacity) {
        int f = s, t = s + 1;
        for (int i : p.alive[s])
          if (offset[i] < 0) f = min(f, p.a[i]), t = max(t, p.b[i]);
        return failed(f, t);
      }
    std::sort(next.begin(), next.end(), [&](int i, int j) {
      return std::pair(lowest[i], rank[i]) < std::pair(lowest[j], rank[j]);
    });
    int f = hi, t = lo, before = -1;
    for (int i : next) {
      if (before >= 0 && p.twins(i, before) && lowest[i] == lowest[before]) continue;
      before = i;
      size_t mark = trail.size();
      offset[i] = lowest[i];
      lift(i);
      vector<int> rest;
      for (int j : todo)
        if (j != i) rest.push_back(j);
      if (rest.empty() || independent(rest, offset[i], rank[i])) return true;
      take_back(i, mark);
      if (over() || (jump && (from >= p.b[i] || to <= p.a[i]))) return false;
      f = min(f, from), t = max(t, to);
    }
    return f < t ? failed(f, t) : failed(lo, hi);
  }
};

// The picture so far has a height in every section. Of its valleys, at their left and right ends,
// the place with the fewest choices: a buffer that fits into the valley, or, where the capacity
// leaves room for the waste, none, and the valley rises to its lower neighbour. Good where there is
// next to no room for waste; it does not try all.
struct Valleys : Search {
  vector<Bytes> height, spare;
  vector<int> count;  // of buffers still to come, in a section
  Valleys(const Problem& p, vector<int> rank, int64_t most, Clock::time_point end)
      : Search(p, std::move(rank), most, end),
        height(p.sections), spare(p.sections), count(p.sections) {
    for (int s = 0; s < p.sections; ++s)
      spare[s] = p.capacity - p.total[s], count[s] = static_cast<int>(p.alive[s].size());
  }
  Bytes wall(int s) const { return s < 0 || s >= p.sections || !count[s] ? FAR : height[s]; }
  void put(int i, Bytes at, Bytes top, int change) {
    offset[i] = at;
    for (int s = p.a[i]; s < p.b[i]; ++s) height[s] = top, count[s] += change;
  }

  bool run() {
    if (++steps, over()) return false;
    int lo = -1, hi = -1;
    size_t fewest = SIZE_MAX;
    bool waste = false;
    vector<int> choices;
    for (int l = 0, r; l < p.sections; l = r) {
      for (r = l + 1; count[l] && r < p.sections && count[r] && height[r] == height[l];) ++r;
      Bytes rise = min(wall(l - 1), wall(r)) - height[l];
      if (!count[l] || rise <= 0) continue;
      bool may = rise < FAR / 2;
      for (int s = l; s < r && may; ++s) may = spare[s] >= rise;
      for (int s : {l, r - 1}) {
        vector<int> fit;
        Bytes sum = spare[s];
        for (int i : p.alive[s])
          if (offset[i] < 0 && p.a[i] >= l && p.b[i] <= r) {
            sum += p.size[i];
            auto same = [&](int j) { return p.twins(i, j); };
            if (std::none_of(fit.begin(), fit.end(), same)) fit.push_back(i);
          }
        if (fit.size() + may == 0 || (rise < FAR / 2 && sum < rise)) return failed(l, r);
        if (fit.size() + may < fewest)
          fewest = fit.size() + may, lo = l, hi = r, waste = may, choices = std::move(fit);
      }
    }
    if (lo < 0) return true;
    Bytes h = height[lo], left = wall(lo - 1), right = wall(hi);
    auto fills = [&](int i) {  // its width, and up to a neighbour
      return 2 * (p.a[i] == lo && p.b[i] == hi) + (h + p.size[i] == left || h + p.size[i] == right);
    };
    std::sort(choices.begin(), choices.end(), [&](int i, int j) {
      return std::pair(-fills(i), rank[i]) < std::pair(-fills(j), rank[j]);
    });
    for (int i : choices) {
      put(i, h, h + p.size[i], -1);
      if (run()) return true;
      put(i, -1, h, 1);
      if (over()) return false;
    }
    if (!waste) return failed(lo, hi);
    Bytes rise = min(left, right) - h;
    for (int s = lo; s < hi; ++s) height[s] += rise, spare[s] -= rise;
    if (run()) return true;
    for (int s = lo; s < hi; ++s) height[s] -= rise, spare[s] += rise;
    return false;
  }
};
// Sets offsets that stay below the capacity. Returns 1; 0 if there are none; -1 if time was up.
int pack_until(const Buffers& x, Bytes capacity, Clock::time_point end, int64_t seed,
               vector<Bytes>& offsets) {
  Bytes unit = unit_of(x);  // in units, more sums are equal
  Problem p(x, unit, capacity / unit);
  int n = x.n;
  for (Bytes total : p.total)
    if (total > p.capacity) return 0;
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> chance(-0.5, 0.5);
  double spent[3] = {};  // seconds, of the searches; the one that had the least is next
  int rounds[3] = {};
  for (;;) {
    auto begin = Clock::now();
    int kind = static_cast<int>(std::min_element(spent, spent + 3) - spent), round = rounds[kind]++;
    double noise = min(1.0, round / 3 * 0.1);
    vector<double> weight(n);
    for (int i = 0; i < n; ++i) {
      double width = static_cast<double>(p.b[i] - p.a[i]) / p.sections;
      double height = static_cast<double>(p.size[i]) / static_cast<double>(p.capacity);
      weight[i] = round % 3 == 0 ? width + 1e-6 * height
                  : round % 3 == 1 ? width * height : width + height;
      weight[i] = weight[i] * (1 + noise * chance(random)) + (kind == 2) * noise * chance(random);
    }
    vector<int> order(n), rank(n);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int i, int j) { return weight[i] > weight[j]; });
    for (int i = 0; i < n; ++i) rank[order[i]] = i;
    auto steps = static_cast<int64_t>(2000 * std::pow(1.3, min(round, 60)));  // in the end, all

    auto attempted = [&](auto search) {
      bool found = search.run();
      for (int i = 0; found && i < n; ++i) offsets[i] = search.offset[i] * unit;
      return found ? 1 : search.over() || kind ? -1 : 0;
    };
    int answer = kind == 2 ? attempted(Valleys(p, rank, 20000, end))
                           : attempted(Ascending(p, rank, steps, end, kind == 1));
    if (answer >= 0 || Clock::now() > end) return answer;
    spent[kind] += std::chrono::duration<double>(Clock::now() - begin).count();
  }
}

// As pack_until, for thousands of buffers: places those that are alive in nearly full sections, and
// then the others, larger and longer ones first, around them.
int pack_core(const Buffers& x, Bytes capacity, Clock::time_point end, int64_t seed,
              vector<Bytes>& offsets) {
  vector<Bytes> live = live_bytes(x);
  for (double share : {0.98, 0.9, 0.7, 0.0}) {
    if (share > 0 && x.n <= 400) continue;  // so few are placed at once
    vector<int> full(live.size() + 1), core, rest;  // full: how many sections before one are
    for (size_t s = 0; s < live.size(); ++s)
      full[s + 1] = full[s] + (static_cast<double>(live[s]) / static_cast<double>(capacity) >= share);
    for (int i = 0; i < x.n; ++i)
      (full[x.end[i]] > full[x.start[i]] ? core : rest).push_back(i);
    double left = std::chrono::duration<double>(end - Clock::now()).count();
    if (core.size() > 6000 || left <= 0) break;
    if (core.empty()) continue;
    vector<int64_t> columns[3];
    for (int i : core) {
      columns[0].push_back(x.start[i]);
      columns[1].push_back(x.end[i]);
      columns[2].push_back(x.size[i]);
    }
    Buffers part{static_cast<int>(core.size()), columns[0].data(), columns[1].data(),
                 columns[2].data()};
    vector<Bytes> found(part.n);
    int answer = pack_until(part, capacity, after(share > 0 ? left / 3 : left), seed, found);
    if (answer == 0) return 0;
    if (answer < 0) continue;
    std::fill(offsets.begin(), offsets.end(), -1);
    for (int k = 0; k < part.n; ++k) offsets[core[k]] = found[k];
    auto area = [&](int i) {
      return static_cast<double>(x.size[i]) * static_cast<double>(x.end[i] - x.start[i]);
    };
    std::stable_sort(rest.begin(), rest.end(), [&](int i, int j) { return area(i) > area(j); });
    if (place_in_order(x, rest, false, offsets, end) && peak_of(x, offsets) <= capacity) return 1;
  }
  return -1;
}

// In the order of offsets, a buffer that ends at the peak, or just below it, moves forward, and
// equal or (with a falling probability) worse results are taken.
void local_search(const Buffers& x, Bytes goal, double seconds, int64_t seed,
                  vector<Bytes>& offsets) {
  struct State { Bytes peak; vector<int> order; vector<Bytes> offset; };
  auto deadline = after(seconds);
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> unit(0, 1);
  State best{peak_of(x, offsets), vector<int>(x.n), offsets};
  std::iota(best.order.begin(), best.order.end(), 0);
  std::sort(best.order.begin(), best.order.end(),
            [&](int i, int j) { return offsets[i] < offsets[j]; });
  auto left = [&] {  // of the time
    return std::chrono::duration<double>(deadline - Clock::now()).count() / seconds;
  };
  State now = best;
  for (int64_t step = 1; best.peak > goal && left() > 0; ++step) {
    if (step % (200 + 10 * x.n) == 0) now = best;
    State next{0, now.order, vector<Bytes>(x.n, -1)};
    double high = static_cast<double>(now.peak) * (1 - unit(random) / 8);
    vector<int> tops;  // where in the order
    for (int k = 0; k < x.n; ++k)
      if (static_cast<double>(now.offset[now.order[k]] + x.size[now.order[k]]) > high)
        tops.push_back(k);
    int from = tops[random() % tops.size()];
    int to = static_cast<int>(random() % (from + 1));
    std::rotate(next.order.begin() + to, next.order.begin() + from, next.order.begin() + from + 1);
    if (!place_in_order(x, next.order, false, next.offset, deadline)) break;
    next.peak = peak_of(x, next.offset);
    double worse = static_cast<double>(next.peak) / static_cast<double>(now.peak) - 1;
    worse /= 0.02 * max(0.0, left()) + 1e-9;
    if (worse <= 0 || unit(random) < std::exp(-worse) / 4) {
      now = std::move(next);
      if (now.peak < best.peak) best = now;
    }
  }
  offsets = best.offset;
}

// Orders in which a first fit is often good: by size, life, their product, birth, the fullest
// section that a buffer is alive in, and death. Fewer where time is up.
vector<vector<int>> good_orders(const Buffers& x, Clock::time_point deadline) {
  vector<Bytes> table = live_bytes(x), fullest(x.n);  // table[s]: the fullest of `width` from s on
  for (int64_t width = 1; width < static_cast<int64_t>(table.size()); width *= 2) {
    for (int i = 0; i < x.n; ++i)  // two of the table's spans cover a life
      if (x.end[i] - x.start[i] >= width)
        fullest[i] = max(table[x.start[i]], table[x.end[i] - width]);
    for (size_t s = 0; s + width < table.size(); ++s) table[s] = max(table[s], table[s + width]);
  }
  auto size = [&](int i) { return static_cast<double>(x.size[i]); };
  auto life = [&](int i) { return static_cast<double>(x.end[i] - x.start[i]); };
  auto full = [&](int i) { return static_cast<double>(fullest[i]); };
  vector<vector<int>> orders;
  auto add = [&](auto key) {
    if (Clock::now() > deadline) return;
    orders.emplace_back(x.n);
    std::iota(orders.back().begin(), orders.back().end(), 0);
    std::stable_sort(orders.back().begin(), orders.back().end(),
                     [&](int i, int j) { return key(i) > key(j); });
  };
  add([&](int i) { return std::pair(size(i), life(i)); });
  add([&](int i) { return std::pair(life(i), size(i)); });
  add([&](int i) { return std::pair(size(i) * life(i), 0.0); });
  add([&](int i) { return std::pair(-static_cast<double>(x.start[i]), life(i)); });
  add([&](int i) { return std::pair(full(i), size(i)); });
  add([&](int i) { return std::pair(full(i), life(i)); });
  add([&](int i) { return std::pair(static_cast<double>(x.end[i]), life(i)); });
  return orders;
}
}  // namespace

extern "C" {
// A sweep over time, of O(n * gaps): the lowest gap that is large enough, at birth. Where time is
// up, all later buffers lie above one another. Returns whether it was not.
int first_fit_by_birth(int64_t n, const int64_t* start, const int64_t* end, const int64_t* size,
                       double seconds, int64_t* offsets) {
  auto deadline = after(seconds);
  vector<int> births(n), deaths(n);
  std::iota(births.begin(), births.end(), 0);
  std::iota(deaths.begin(), deaths.end(), 0);
  std::stable_sort(births.begin(), births.end(), [&](int i, int j) {
    return std::pair(start[i], -end[i]) < std::pair(start[j], -end[j]);
  });
  std::sort(deaths.begin(), deaths.end(), [&](int i, int j) { return end[i] < end[j]; });
  vector<Bytes> gaps{0}, rooms{FAR};  // where gaps begin, in order; their sizes
  Bytes peak = 0;
  for (int64_t k = 0, dead = 0; k < n; ++k) {
    if (k % 64 == 0 && Clock::now() > deadline) {
      for (; k < n; peak += size[births[k]], ++k) offsets[births[k]] = peak;
      return 0;
    }
    int i = births[k];
    for (; end[deaths[dead]] <= start[i]; ++dead) {
      int j = deaths[dead];
      Bytes low = offsets[j], high = low + size[j];
      auto g = std::lower_bound(gaps.begin(), gaps.end(), low) - gaps.begin();  // the gap above
      bool joins_above = gaps[g] == high;
      bool joins_below = g > 0 && gaps[g - 1] + rooms[g - 1] == low;
      if (joins_above) {
        gaps[g] = low;
        rooms[g] += size[j];
      }
      if (joins_below) rooms[g - 1] += joins_above ? rooms[g] : size[j];
      if (joins_above && joins_below) {
        gaps.erase(gaps.begin() + g);
        rooms.erase(rooms.begin() + g);
      } else if (!joins_above && !joins_below) {
        gaps.insert(gaps.begin() + g, low);
        rooms.insert(rooms.begin() + g, size[j]);
      }
    }
    size_t g = 0;
    while (rooms[g] < size[i]) ++g;  // the last gap has no end
    offsets[i] = gaps[g];
    peak = max(peak, offsets[i] + size[i]);
    gaps[g] += size[i];
    rooms[g] -= size[i];
    if (!rooms[g]) {
      gaps.erase(gaps.begin() + g);
      rooms.erase(rooms.begin() + g);
    }
  }
  return 1;
}

// Replaces offsets by those of better first fits, until one meets the goal or time is up.
void greedy(int64_t n, const int64_t* start, const int64_t* end, const int64_t* size, int64_t goal,
            double seconds, int64_t* offsets) {
  auto deadline = after(seconds);
  Buffers x{static_cast<int>(n), start, end, size};
  Bytes peak = peak_of(x, vector<Bytes>(offsets, offsets + n));
  if (peak <= goal) return;
  for (const vector<int>& order : good_orders(x, deadline))
    for (bool best_fit : {false, true}) {
      vector<Bytes> next(n, -1);
      if (peak <= goal || !place_in_order(x, order, best_fit, next, deadline)) return;
      if (peak_of(x, next) < peak) {
        peak = peak_of(x, next);
        std::copy(next.begin(), next.end(), offsets);
      }
    }
}

// As pack_until.
int pack(int64_t n, const int64_t* start, const int64_t* end, const int64_t* size, int64_t capacity,
         double seconds, int64_t seed, int64_t* offsets) {
  vector<Bytes> found(n);
  int answer = pack_until({static_cast<int>(n), start, end, size}, capacity, after(seconds), seed,
                          found);
  if (answer == 1) std::copy(found.begin(), found.end(), offsets);
  return answer;
}

// Replaces offsets by better ones, until their peak meets the goal, and *bound by a better one.
// Capacities are first the best that can be, then between what failed and what is known; a proof
// raises the bound to the next sum of sizes. Returns 1 or 2: the search that has found the offsets,
// left-justified or local; or 0, where they were not found here.
int search(int64_t n, const int64_t* start, const int64_t* end, const int64_t* size, int64_t goal,
           double seconds, int64_t seed, int64_t* bound, int64_t* offsets) {
  auto deadline = after(seconds);
  auto left = [&] { return std::chrono::duration<double>(deadline - Clock::now()).count(); };
  Buffers x{static_cast<int>(n), start, end, size};
  vector<Bytes> best(offsets, offsets + n), next(n);
  Bytes unit = unit_of(x), peak = peak_of(x, best);
  Bytes capacity = goal = max(goal, *bound), failed = goal - 1;
  int kind = 0;
  while (peak > goal && left() > 0 && capacity > failed) {
    int answer = pack_core(x, capacity, after(left() / 4), seed, next);
    if (answer == 1) {
      best = next;
      peak = peak_of(x, best);
      kind = 1;
    } else {
      failed = capacity;
    }
    if (answer == 0) {
      *bound = max(*bound, (capacity / unit + 1) * unit);
      goal = max(goal, *bound);
    }
    capacity = failed + (peak - failed) / 2;
    if (capacity < failed + max(unit, peak / 2000)) capacity = peak - unit;  // for a proof
  }
  if (peak > goal && left() > 0) {
    local_search(x, goal, left(), seed, best);
    if (peak_of(x, best) < peak) kind = 2;
  }
  std::copy(best.begin(), best.end(), offsets);
  return kind;
}
}  // extern "C"
