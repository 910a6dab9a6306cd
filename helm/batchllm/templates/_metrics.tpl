{{/* Metrics of pods; arguments: root, kind (gpu or cpu). */}}

{{/* "true" if the pod serves some: `batchllm run` does, and it runs on GPUs. */}}
{{- define "batchllm.servesMetrics" -}}
{{- if and (eq .kind "gpu") .root.Values.monitoring.metrics.enabled -}}true{{- end -}}
{{- end -}}

{{/* What the user says, and where Prometheus finds the metrics; the user's win. */}}
{{- define "batchllm.podAnnotations" -}}
{{- $annotations := dict -}}
{{- if and (include "batchllm.servesMetrics" .) .root.Values.monitoring.metrics.annotations -}}
{{- $port := toString (int64 .root.Values.monitoring.metrics.port) -}}
{{- $annotations = dict "prometheus.io/scrape" "true" "prometheus.io/port" $port "prometheus.io/path" "/metrics" -}}
{{- end -}}
{{- merge (dict) .root.Values.pods.annotations $annotations | toYaml -}}
{{- end -}}
