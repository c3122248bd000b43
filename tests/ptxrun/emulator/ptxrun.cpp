// Executes PTX for sm_90a on a CPU: the C interface, which ptxrun.py loads.

#include "parser.h"
#include "schedule.h"

namespace ptxrun {

static string quoted(const string& s) {
  string r = "\"";
  for (char ch : s) {
    if (ch == '"' || ch == '\\')
      r += '\\', r += ch;
    else if (ch == '\n')
      r += "\\n";
    else if ((u8)ch < 32)
      r += ' ';
    else
      r += ch;
  }
  return r + "\"";
}

static char* handed(const string& s) {
  char* p = (char*)malloc(s.size() + 1);
  memcpy(p, s.c_str(), s.size() + 1);
  return p;
}

// The runs of bytes that a launch read or wrote: base of the region, first byte, bytes, 1 for writes.
static string touched(const vector<Region>& regions) {
  string j;
  for (auto& r : regions)
    for (int write = 0; write < 2; write++) {
      const u32* cta = r.writer ? write ? r.writer : r.reader : nullptr;
      for (u64 b = 0, n = r.end - r.base; cta && b < n; b++) {
        if (!r.accessed[b >> kAccessedShift]) {
          b |= (1 << kAccessedShift) - 1;  // to read the array here would page it in
          continue;
        }
        if (!cta[b]) continue;
        u64 start = b;
        while (b < n && cta[b]) b++;
        j += (j.empty() ? "[" : ",[") + fmt("%llu,%llu,%llu,%d]", (unsigned long long)r.base, (unsigned long long)start,
                                           (unsigned long long)(b - start), write);
      }
    }
  return j;
}

struct CRegion {
  u64 base, size;
  u32 readonly, pad;
  const char* name;
};

struct CConfig {
  u64 seed, limit;
  u32 threads, uninit_regs, uninit_shared, races, global_races, approx, mma, quantum, timing, wgmma_registers, touched;
};

extern "C" {
void ptx_free(char* p) { free(p); }

void* ptx_parse(const char* text, char** out) {
  auto* m = new Module;
  m->text = text;
  try {
    Parser p(*m);
    p.module();
    int uid = 0;
    for (auto& f : m->funcs)
      for (auto& in : f.code) in.uid = uid++;
    string j = "{\"kernels\":[";
    bool first = true;
    for (auto& f : m->funcs)
      if (f.entry) {
        j += (first ? "" : ",") + string("{\"name\":") + quoted(f.name) + ",\"params\":[";
        first = false;
        for (size_t i = 0; i < f.params.size(); i++) {
          auto& q = f.params[i];
          j += fmt("%s{\"offset\":%d,\"size\":%d,\"float\":%d,\"bits\":%d}", i ? "," : "", q.offset, q.size,
                   (int)is_float(q.t), bits_of(q.t));
        }
        j +=
            fmt("],\"param_bytes\":%d,\"static_shared\":%d,\"registers\":%d,\"instructions\":%zu,\"reqntid\":[%d,%d,%d]"
                ",\"maxntid\":[%d,%d,%d],\"cluster\":[%d,%d,%d]}",
                f.param_bytes, m->module_shared + f.shared_bytes, f.nregs, f.code.size(), f.reqntid[0], f.reqntid[1],
                f.reqntid[2], f.maxntid[0], f.maxntid[1], f.maxntid[2], f.cluster[0], f.cluster[1], f.cluster[2]);
      }
    j += "],\"unsupported\":[";
    for (size_t i = 0; i < m->unsupported.size(); i++) j += (i ? "," : "") + quoted(m->unsupported[i]);
    *out = handed(j + "]}");
    return m;
  } catch (std::exception& e) {
    *out = handed(e.what());
    delete m;
    return nullptr;
  }
}

void ptx_delete(void* p) { delete (Module*)p; }

int ptx_launch(void* mod, const char* entry, const u32* grid, const u32* block, const u32* cluster, u32 dynamic,
               const u8* params, u32 param_bytes, const CRegion* regs, u32 nregs, const CConfig* cc, char** out) {
  Module& m = *(Module*)mod;
  string error;
  std::map<string, Report> reports;
  Stats total;
  size_t uids = 0;
  for (auto& f : m.funcs) uids += f.code.size();
  vector<Region> regions;
  vector<std::unique_ptr<u32, decltype(&free)>> shadows;
  total.n.assign(uids, 0);
  total.lanes = total.units = total.ideal = total.bytes = total.n;
  try {
    auto k = m.func_index.find(entry);
    if (k == m.func_index.end() || !m.funcs[k->second].entry) throw Fault(string("no kernel ") + entry);
    Func& f = m.funcs[k->second];
    if ((int)param_bytes != f.param_bytes)
      throw Fault(fmt("kernel %s takes %d bytes of parameters, not %u", entry, f.param_bytes, param_bytes));
    u32 threads_ = block[0] * block[1] * block[2];
    if (!threads_ || threads_ > 1024) throw Fault(fmt("%u threads in a block", threads_));
    if (f.reqntid[0] && (int)threads_ != f.reqntid[0] * f.reqntid[1] * f.reqntid[2])
      throw Fault(
          fmt("kernel %s requires %d threads, not %u", entry, f.reqntid[0] * f.reqntid[1] * f.reqntid[2], threads_));
    if (f.maxntid[0] && (int)threads_ > f.maxntid[0] * f.maxntid[1] * f.maxntid[2])
      throw Fault(fmt("kernel %s runs with at most %d threads, not %u", entry,
                      f.maxntid[0] * f.maxntid[1] * f.maxntid[2], threads_));
    for (int i = 0; i < 3; i++) {
      if (!grid[i]) throw Fault("an empty grid");
      if (grid[i] % cluster[i]) throw Fault("the grid is not a multiple of the cluster");
    }
    Config c;
    c.seed = cc->seed;
    c.limit = cc->limit;
    c.threads = cc->threads;
    c.uninit_regs = cc->uninit_regs;
    c.uninit_shared = cc->uninit_shared;
    c.races = cc->races;
    c.global_races = cc->global_races;
    c.approx = cc->approx;
    c.mma = cc->mma;
    c.quantum = cc->quantum;
    c.timing_random = cc->timing;
    c.wgmma_registers = cc->wgmma_registers;
    for (u32 i = 0; i < nregs; i++)
      if (regs[i].size)
        regions.push_back({regs[i].base, regs[i].base + regs[i].size, (bool)regs[i].readonly, regs[i].name});
    for (size_t i = 0; i < m.global_regions.size(); i++)
      regions.push_back({m.global_regions[i].first, m.global_regions[i].first + m.global_regions[i].second, false,
                         m.global_names[i]});
    std::sort(regions.begin(), regions.end(), [](auto& a, auto& b) { return a.base < b.base; });
    if (cc->touched || (c.global_races && grid[0] * grid[1] * grid[2] > 1))
      for (auto& r : regions) {
        size_t n = r.end - r.base;
        if ((r.readonly && !cc->touched) || n > 1ull << 34) continue;
        for (u32** p : {&r.writer, &r.reader}) {
          shadows.emplace_back((u32*)calloc(n, 4), &free);
          *p = shadows.back().get();
        }
        shadows.emplace_back((u32*)calloc((n >> kAccessedShift) + 1, 1), &free);
        r.accessed = (u8*)shadows.back().get();
        if (!r.reader || !r.accessed) r.writer = nullptr;
      }
    int statics = m.module_shared + f.shared_bytes,
        base = (SHARED_BASE + statics + m.dynamic_align - 1) / m.dynamic_align * m.dynamic_align,
        limit = base + (int)dynamic;
    if (limit - (int)SHARED_BASE > 227 * 1024)
      throw Fault(fmt("%d bytes of shared memory, more than 227 KB", limit - (int)SHARED_BASE));
    for (auto& d : m.dynamic_imms) d.first->fill((u64)(base + d.second));
    std::mutex atomics, merge;
    std::atomic<u64> next{0};
    std::atomic<bool> stop{false};
    u64 ncl[3] = {grid[0] / cluster[0], grid[1] / cluster[1], grid[2] / cluster[2]}, count = ncl[0] * ncl[1] * ncl[2];
    auto work = [&] {
      Machine x(m, f, c, regions);
      x.atomics = &atomics;
      x.params = params;
      x.static_shared = statics;
      x.dynamic_shared = dynamic;
      x.shared_limit = limit;
      x.stats.n.assign(uids, 0);
      x.stats.lanes = x.stats.units = x.stats.ideal = x.stats.bytes = x.stats.n;
      vector<std::unique_ptr<Cta>> own;
      for (int i = 0; i < 3; i++) x.grid[i] = grid[i], x.block[i] = block[i], x.cluster[i] = cluster[i];
      for (u32 i = 0; i < cluster[0] * cluster[1] * cluster[2]; i++)
        own.emplace_back(new Cta), x.ctas.push_back(own.back().get());
      try {
        for (u64 i; !stop && (i = next++) < count;) {
          u32 first[3] = {(u32)(i % ncl[0]) * cluster[0], (u32)(i / ncl[0] % ncl[1]) * cluster[1],
                          (u32)(i / (ncl[0] * ncl[1])) * cluster[2]};
          x.run_cluster(first);
        }
      } catch (std::exception& e) {
        std::lock_guard<std::mutex> l(merge);
        if (error.empty()) {
          error = e.what();
          if (error.find("\n  at ") == string::npos && x.current && x.now)
            error += "\n  at " + x.where(*x.current, *x.now);
        }
        stop = true;
      }
      std::lock_guard<std::mutex> l(merge);
      for (auto& r : x.reports) {
        auto& q = reports[r.first];
        u64 n = q.count;
        if (!n)
          q = r.second;
        else
          q.count = n + r.second.count;
      }
      for (size_t i = 0; i < uids; i++)
        total.n[i] += x.stats.n[i], total.lanes[i] += x.stats.lanes[i], total.units[i] += x.stats.units[i],
            total.ideal[i] += x.stats.ideal[i], total.bytes[i] += x.stats.bytes[i];
      for (int i = 0; i < 64; i++)
        for (int k = 0; k < C_COUNT; k++) total.warp_class[i][k] += x.stats.warp_class[i][k];
      total.instructions += x.stats.instructions;
    };
    vector<std::thread> pool;
    for (int i = 1; i < c.threads && (u64)i < count; i++) pool.emplace_back(work);
    work();
    for (auto& t : pool) t.join();
  } catch (std::exception& e) { error = e.what(); }
  string j = "{\"error\":" + quoted(error) + ",\"reports\":[";
  bool first = true;
  for (auto& r : reports) {
    j += (first ? "" : ",") + string("{\"kind\":") + quoted(r.second.kind) + ",\"text\":" + quoted(r.second.text) +
         fmt(",\"count\":%llu}", (unsigned long long)r.second.count);
    first = false;
  }
  j += fmt("],\"instructions\":%llu,\"by_warp\":[", (unsigned long long)total.instructions);
  int warps = (block[0] * block[1] * block[2] + 31) / 32;
  for (int i = 0; i < warps && i < 64; i++) {
    j += i ? ",[" : "[";
    for (int k = 0; k < C_COUNT; k++) j += fmt("%s%llu", k ? "," : "", (unsigned long long)total.warp_class[i][k]);
    j += "]";
  }
  j += "],\"classes\":[";
  for (int k = 0; k < C_COUNT; k++) j += (k ? "," : "") + quoted(class_names[k]);
  j += "],\"lines\":[";
  first = true;
  size_t uid = 0;
  for (auto& f : m.funcs)
    for (auto& in : f.code) {
      size_t i = uid++;
      if (!total.n[i]) continue;
      string nm = in.name;
      for (auto& s : in.mods) nm += "." + s;
      j += (first ? "[" : ",[") + fmt("%u,%d,", in.line, (int)in.cls) + quoted(nm) +
           fmt(",%llu,%llu,%llu,%llu,%llu]", (unsigned long long)total.n[i], (unsigned long long)total.lanes[i],
               (unsigned long long)total.units[i], (unsigned long long)total.ideal[i],
               (unsigned long long)total.bytes[i]);
      first = false;
    }
  j += "],\"touched\":[" + (cc->touched ? touched(regions) : "");
  *out = handed(j + "]}");
  return error.empty() ? 0 : 1;
}
}

}  // namespace ptxrun
