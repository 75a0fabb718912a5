/** The bodies of the REST API, made from its description (`npm run types` in tests/web), as the pages read them. */
import type { components, paths } from "../../../../tests/web/api-types";

type Schemas = components["schemas"];
/** An answer has every field, and what the description leaves open may be anything. */
type Whole<T> = unknown extends T ? any : T extends (infer One)[] ? Whole<One>[] : T extends object ? { [Key in keyof T]-?: Whole<T[Key]> } : T;
type Get<Path extends keyof paths> = paths[Path]["get"] extends { responses: { 200: { content: { "application/json": infer Body } } } } ? Whole<Body> : never;
type Under<Path extends string> = `v1/jobs/${string}/${Path}`;
type Asked<Path extends string> = Path | `${Path}?${string}`;

/** The answer to a GET of ``Path``; a path that is only known as a text: anything. */
export type Answer<Path extends string> =
  string extends Path ? any
  : Path extends Asked<"v1/whoami"> ? Get<"/v1/whoami">
  : Path extends Asked<"v1/queue"> ? Get<"/v1/queue">
  : Path extends Asked<"v1/quotas"> ? Get<"/v1/quotas">
  : Path extends Asked<"v1/fleet"> ? Get<"/v1/fleet">
  : Path extends Asked<"v1/usage"> ? Get<"/v1/usage">
  : Path extends Asked<"v1/audit"> ? Get<"/v1/audit">
  : Path extends "v1/webhooks" ? Get<"/v1/webhooks">
  : Path extends Asked<`v1/webhooks/${string}/deliveries`> ? Get<"/v1/webhooks/{webhook_id}/deliveries">
  : Path extends Asked<"v1/jobs"> ? Get<"/v1/jobs">
  : Path extends Under<`compare/${string}`> ? Get<"/v1/jobs/{job_id}/compare/{with_job_id}">
  : Path extends Under<Asked<"hook/history">> ? Get<"/v1/jobs/{job_id}/hook/history">
  : Path extends Under<Asked<"hook">> ? Get<"/v1/jobs/{job_id}/hook">
  : Path extends Under<Asked<"metrics">> ? Get<"/v1/jobs/{job_id}/metrics">
  : Path extends Under<"trackers"> ? Get<"/v1/jobs/{job_id}/trackers">
  : Path extends Under<Asked<"events">> ? Get<"/v1/jobs/{job_id}/events">
  : Path extends Under<Asked<"logs">> ? Get<"/v1/jobs/{job_id}/logs">
  : Path extends Under<Asked<"files">> ? Get<"/v1/jobs/{job_id}/files">
  : Path extends Under<Asked<"attempts">> ? Get<"/v1/jobs/{job_id}/attempts">
  : Path extends Under<`attempts/${string}`> ? Get<"/v1/jobs/{job_id}/attempts/{number}">
  : Path extends Under<Asked<"checkpoints">> ? Get<"/v1/jobs/{job_id}/checkpoints">
  : Path extends Under<`checkpoints/${string}`> ? Get<"/v1/jobs/{job_id}/checkpoints/{checkpoint_id}">
  : Path extends `v1/jobs/${string}` ? Get<"/v1/jobs/{job_id}">
  : any;

declare global {
  namespace Api {
    type Job = Whole<Schemas["JobView"]>;
    type AttemptSummary = Whole<Schemas["AttemptSummary"]>;
    type MetricSummary = Whole<Schemas["MetricSummary"]>;
    type Attempt = Whole<Schemas["AttemptView"]>;
    type Checkpoint = Whole<Schemas["CheckpointView"]>;
    type CheckpointDetail = Whole<Schemas["CheckpointDetail"]>;
    type Report = Whole<Schemas["ResumeReportView"]>;
    type Component = Whole<Schemas["ComponentReport"]>;
    type Environment = Whole<Schemas["EnvironmentView"]>;
    type Node = Whole<Schemas["NodeView"]>;
    type Event = Whole<Schemas["EventView"]>;
    type Hook = Whole<Schemas["HookView"]>;
    type HookSample = Whole<Schemas["HookSampleView"]>;
    type Summary = Whole<Schemas["HookSummary"]>;
    type Series = Whole<Schemas["MetricSeries"]>;
    type Point = Whole<Schemas["MetricPoint"]>;
    type Fleet = Whole<Schemas["FleetView"]>;
    type Owner = Whole<Schemas["OwnerUseView"]>;
    type Usage = Whole<Schemas["UsageView"]>;
    type Audit = Whole<Schemas["AuditView"]>;
    type Webhook = Whole<Schemas["WebhookView"]>;
    type Queue = Get<"/v1/queue">;
    type Quota = Whole<Schemas["QuotaView"]>;
    type Caller = Whole<Schemas["WhoAmI"]>;
    type Line = Whole<Schemas["LogLine"]>;
    type File = Whole<Schemas["FileView"]>;
    type Comparison = Whole<Schemas["ComparisonView"]>;
  }
}
