// Offsets below a ceiling, by two depth-first searches that start again and again, in other orders
// and with more steps: memplan.py's `pack`. Both fill from the bottom up, and give up where what is
// wasted at a moment exceeds what the ceiling leaves there.
//
// Time is cut into sections, between which nothing is born or dies. Legend: n requests, i, j; s a
// section; [a, b) the sections of a request; floor[s] the lowest offset for what is still to come.
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

struct Problem {
  int n, sections;
  vector<int> a, b;
  vector<Bytes> size, total;         // total: of a section
  vector<vector<int>> alive, near;  // in a section; requests that live together with one
  Bytes ceiling;

  Problem(int n, const int64_t* lower, const int64_t* upper, const int64_t* size, Bytes ceiling)
      : n(n), a(n), b(n), size(size, size + n), near(n), ceiling(ceiling) {
    vector<int64_t> times(lower, lower + n);
    times.insert(times.end(), upper, upper + n);
    std::sort(times.begin(), times.end());
    times.erase(std::unique(times.begin(), times.end()), times.end());
    sections = static_cast<int>(times.size()) - 1;
    total.resize(sections), alive.resize(sections);
    auto at = [&](int64_t t) {
      return static_cast<int>(std::lower_bound(times.begin(), times.end(), t) - times.begin());
    };
    for (int i = 0; i < n; ++i) {
      a[i] = at(lower[i]), b[i] = at(upper[i]);
      for (int s = a[i]; s < b[i]; ++s) alive[s].push_back(i), total[s] += size[i];
    }
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < n; ++j)
        if (i != j && a[i] < b[j] && a[j] < b[i]) near[i].push_back(j);
  }
  bool twins(int i, int j) const { return a[i] == a[j] && b[i] == b[j] && size[i] == size[j]; }
};

using Clock = std::chrono::steady_clock;

struct Search {
  const Problem& p;
  vector<Bytes> offset;  // -1: still to come
  vector<int> rank;      // of requests, in the order that is tried first
  int64_t steps = 0, most;
  Clock::time_point end;
  int from = 0, to = 0;  // the sections that the last failure is about
  Search(const Problem& p, vector<int> rank, int64_t most, Clock::time_point end)
      : p(p), offset(p.n, -1), rank(std::move(rank)), most(most), end(end) {}
  bool over() {  // once true, always
    if (steps % 64 == 0 && Clock::now() > end) most = -1;
    return steps > most;
  }
  bool failed(int lo, int hi) { return from = lo, to = hi, false; }
};

// Requests in the order of their offsets: what comes next lies as low as what is placed lets it,
// and never below what came before. One that some other could still go below in whole is skipped:
// the other would have come before. Where nothing that is still to come crosses a border between
// sections, both sides are solved alone. `jump`: a failure about other sections is not repaired by
// another choice here. Most often so, but not always: only without it, not to find offsets proves
// that there are none.
struct Ascending : Search {
  vector<Bytes> lowest, left;  // of a request, on what is placed; of a section, still to come
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
    for (int j : p.near[i])
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
        for (int j : p.near[i])
          if (offset[j] < 0) at = min(at, max(lowest[j], last) + p.size[j]);
      }
      if (at + p.size[i] > p.ceiling) return failed(p.a[i], p.b[i]);
      for (int s = p.a[i]; s < p.b[i]; ++s) floor[s - lo] = min(floor[s - lo], at);
    }
    for (int s = lo; s < hi; ++s)
      if (floor[s - lo] < FAR && floor[s - lo] + left[s] > p.ceiling) {
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
// the place with the fewest choices: a request that fits into the valley, or, where the ceiling
// leaves room for the waste, none, and the valley rises to its lower neighbour. Good where there is
// next to no room for waste; it does not try all.
struct Valleys : Search {
  vector<Bytes> height, spare;
  vector<int> count;  // of requests still to come, in a section
  Valleys(const Problem& p, vector<int> rank, int64_t most, Clock::time_point end)
      : Search(p, std::move(rank), most, end),
        height(p.sections), spare(p.sections), count(p.sections) {
    for (int s = 0; s < p.sections; ++s)
      spare[s] = p.ceiling - p.total[s], count[s] = static_cast<int>(p.alive[s].size());
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
}  // namespace

// Sets offsets that stay below the ceiling. Returns 1; 0 if there are none; -1 if time was up.
extern "C" int pack(int64_t n, const int64_t* lower, const int64_t* upper, const int64_t* size,
                    int64_t ceiling, double seconds, int64_t seed, int64_t* offsets) {
  auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                std::chrono::duration<double>(seconds));
  Problem p(static_cast<int>(n), lower, upper, size, ceiling);
  for (Bytes total : p.total)
    if (total > ceiling) return 0;
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> unit(-0.5, 0.5);
  double spent[3] = {};  // seconds, of the searches; the one that had the least is next
  int rounds[3] = {};
  for (;;) {
    auto begin = Clock::now();
    int kind = static_cast<int>(std::min_element(spent, spent + 3) - spent), round = rounds[kind]++;
    double noise = min(1.0, round / 3 * 0.1);
    vector<double> weight(n);
    for (int i = 0; i < n; ++i) {
      double width = static_cast<double>(p.b[i] - p.a[i]) / p.sections;
      double height = static_cast<double>(size[i]) / static_cast<double>(ceiling);
      weight[i] = round % 3 == 0 ? width + 1e-6 * height
                  : round % 3 == 1 ? width * height : width + height;
      weight[i] = weight[i] * (1 + noise * unit(random)) + (kind == 2) * noise * unit(random);
    }
    vector<int> order(n), rank(n);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int i, int j) { return weight[i] > weight[j]; });
    for (int i = 0; i < n; ++i) rank[order[i]] = i;
    auto steps = static_cast<int64_t>(2000 * std::pow(1.3, min(round, 60)));  // in the end, all

    auto attempted = [&](auto search) {
      bool found = search.run();
      if (found) std::copy(search.offset.begin(), search.offset.end(), offsets);
      return found ? 1 : search.over() || kind ? -1 : 0;
    };
    int answer = kind == 2 ? attempted(Valleys(p, rank, 20000, end))
                           : attempted(Ascending(p, rank, steps, end, kind == 1));
    if (answer >= 0 || Clock::now() > end) return answer;
    spent[kind] += std::chrono::duration<double>(Clock::now() - begin).count();
  }
}
