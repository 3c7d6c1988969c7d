// What a dashboard of ours may hold, in Grafana's own types: the panels that are used, each with the options of its plugin, and
// Prometheus queries. `make.sh` turns it into dashboard.schema.json.
import type { AnnotationContainer, AnnotationQuery, Dashboard, FieldConfig, FieldConfigSource, Panel } from '@grafana/schema';
import type * as bargauge from '@grafana/schema/dist/types/raw/composable/bargauge/panelcfg/x/types.gen';
import type * as heatmap from '@grafana/schema/dist/types/raw/composable/heatmap/panelcfg/x/types.gen';
import type * as stat from '@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/types.gen';
import type * as statetimeline from '@grafana/schema/dist/types/raw/composable/statetimeline/panelcfg/x/types.gen';
import type * as table from '@grafana/schema/dist/types/raw/composable/table/panelcfg/x/types.gen';
import type * as timeseries from '@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/types.gen';
import type { Prometheus } from '@grafana/prometheus/dist/types/dataquery';

type Query = Omit<Prometheus, 'scopes' | 'adhocFilters'>;

type Fields<Custom> = Omit<FieldConfigSource, 'defaults'> & { defaults: Omit<FieldConfig, 'custom'> & { custom?: Custom } };

type Of<Type extends string, Options, Custom> = Omit<Panel, 'type' | 'options' | 'fieldConfig' | 'targets'> & {
  type: Type;
  options: Options;
  fieldConfig: Fields<Custom>;
  targets: Query[];
};

type Shown =
  | Of<'bargauge', bargauge.Options, {}>
  | Of<'heatmap', heatmap.Options, heatmap.FieldConfig>
  | Of<'stat', stat.Options, {}>
  | Of<'state-timeline', statetimeline.Options, statetimeline.FieldConfig>
  | Of<'table', table.Options, table.FieldConfig>
  | Of<'timeseries', timeseries.Options, timeseries.FieldConfig>;

// What Grafana's Prometheus plugin reads besides (its annotations.ts); no type of its own says so.
type Mark = AnnotationQuery<Query> & { titleFormat?: string; textFormat?: string; tagKeys?: string };

type Marks = Omit<AnnotationContainer, 'list'> & { list?: Mark[] };

export type HolterDashboard = Omit<Dashboard, 'panels' | 'annotations'> & { panels: Shown[]; annotations?: Marks };
