/** Names for the bodies of the REST API, made from its description (`npm run types` in tests/web). */
import type { components } from "../../../../tests/web/api-types";

type Schemas = components["schemas"];
export type Job = Schemas["JobView"];
export type Attempt = Schemas["AttemptView"];
export type Checkpoint = Schemas["CheckpointView"];
export type Series = Schemas["MetricSeries"];
export type Point = Schemas["MetricPoint"];
export type Event = Schemas["EventView"];
export type LogLine = Schemas["LogLine"];
export type Hook = Schemas["HookView"];
export type HookSample = Schemas["HookSampleView"];
export type FileEntry = Schemas["FileView"];
export type Queued = Schemas["QueuedView"];
export type Quota = Schemas["QuotaView"];
export type Caller = Schemas["WhoAmI"];
export type Comparison = Schemas["ComparisonView"];
export type Fleet = Schemas["FleetView"];
