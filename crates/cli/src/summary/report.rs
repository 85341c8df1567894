//! The JSON that `lowtide summary --json` prints. The names of the keys are an interface.

use std::collections::BTreeMap;

use lowtide_history::{Category, Held, Kept, Refusal};
use lowtide_replay::ImpliedLimit;
use serde::Serialize;

use super::figures::{HeldModule, HeldSite, Summary};
use crate::job::Job;
use crate::json::ResultRow;
use crate::leaks;
use crate::moment::MomentRow;

/// The summary of one device.
#[derive(Debug, Serialize)]
pub(super) struct Json<'a> {
    trace: &'a Job,
    /// The limit that the job died under, if it is known.
    limit: Option<LimitRow>,
    peak_live: MomentRow,
    peak_reserved: MomentRow,
    /// What is held at the peak of live bytes; null if neither stacks nor the program's labels show it.
    categories: Option<BTreeMap<&'static str, Kept>>,
    /// What modules hold at the peak of live bytes, the most first; empty if the program named none.
    modules: Vec<ModuleRow<'a>>,
    /// What each call site holds at the peak of live bytes, the most first.
    sites: Vec<SiteRow<'a>>,
    growth: GrowthRow<'a>,
    out_of_memory: Vec<RefusalRow>,
    /// The results of other strategies than the job's, under the limit.
    others: Vec<ResultRow<'a>>,
}

#[derive(Debug, Serialize)]
struct LimitRow {
    least_bytes: u64,
    most_bytes: u64,
}

#[derive(Debug, Serialize)]
struct ModuleRow<'a> {
    path: &'a str,
    #[serde(flatten)]
    kept: Kept,
}

#[derive(Debug, Serialize)]
struct SiteRow<'a> {
    site: &'a str,
    #[serde(flatten)]
    kept: Kept,
    category: Option<&'static str>,
}

#[derive(Debug, Serialize)]
struct GrowthRow<'a> {
    verdict: String,
    leaks: usize,
    bytes_per_step: f64,
    /// The call site of the largest leak.
    site: Option<&'a str>,
}

#[derive(Debug, Serialize)]
struct RefusalRow {
    event: u32,
    requested_bytes: u64,
    device_free_bytes: u64,
}

impl<'a> Json<'a> {
    pub(super) fn new(summary: &'a Summary) -> Json<'a> {
        let leaks = &summary.leaks;
        Json {
            trace: &summary.job,
            limit: summary.limit.as_ref().map(LimitRow::new),
            peak_live: MomentRow::new(&summary.peak_live),
            peak_reserved: MomentRow::new(&summary.peak_reserved),
            categories: summary.held.as_ref().map(by_name),
            modules: summary.modules.iter().map(ModuleRow::new).collect(),
            sites: summary.sites.iter().map(SiteRow::new).collect(),
            growth: GrowthRow {
                verdict: leaks::verdict(leaks),
                leaks: leaks.leaks().count(),
                bytes_per_step: leaks.leaks().map(|leak| leak.trend.bytes_per_step).sum(),
                site: summary.largest_leak.as_deref(),
            },
            out_of_memory: summary.refusals.iter().map(RefusalRow::new).collect(),
            others: summary.others.iter().map(ResultRow::new).collect(),
        }
    }
}

fn by_name(held: &Held) -> BTreeMap<&'static str, Kept> {
    let categories = Category::ALL.into_iter();
    categories
        .map(|category| (category.name(), held[category]))
        .collect()
}

impl LimitRow {
    fn new(limit: &ImpliedLimit) -> LimitRow {
        LimitRow {
            least_bytes: limit.least.get(),
            most_bytes: limit.most.get(),
        }
    }
}

impl<'a> ModuleRow<'a> {
    fn new(module: &'a HeldModule) -> ModuleRow<'a> {
        ModuleRow {
            path: &module.path,
            kept: module.kept,
        }
    }
}

impl<'a> SiteRow<'a> {
    fn new(site: &'a HeldSite) -> SiteRow<'a> {
        SiteRow {
            site: &site.line,
            kept: site.kept,
            category: site.category.map(Category::name),
        }
    }
}

impl RefusalRow {
    fn new(refusal: &Refusal) -> RefusalRow {
        RefusalRow {
            event: refusal.moment.instant,
            requested_bytes: refusal.requested.get(),
            device_free_bytes: refusal.device_free.get(),
        }
    }
}
