{{/* Metrics of pods; arguments: root, kind (gpu or cpu). */}}

{{/* "true" if the pod serves metrics: only `batchllm run` does, in GPU pods. */}}
{{- define "batchllm.servesMetrics" -}}
{{- if and (eq .kind "gpu") .root.Values.monitoring.metrics.enabled -}}true{{- end -}}
{{- end -}}

{{/* The user's annotations over those by which Prometheus finds the metrics. */}}
{{- define "batchllm.podAnnotations" -}}
{{- $annotations := dict -}}
{{- if and (include "batchllm.servesMetrics" .) .root.Values.monitoring.metrics.annotations -}}
{{- $port := toString (int64 .root.Values.monitoring.metrics.port) -}}
{{- $annotations = dict "prometheus.io/scrape" "true" "prometheus.io/port" $port "prometheus.io/path" "/metrics" -}}
{{- end -}}
{{- merge (dict) .root.Values.pods.annotations $annotations | toYaml -}}
{{- end -}}
