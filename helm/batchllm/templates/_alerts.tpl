{{/* The rules of alerts/*.yaml. Each file renders one alert, or nothing if the alert doesn't apply. */}}
{{- define "batchllm.alerts" -}}
{{- $alerts := .Values.monitoring.alerts -}}
{{- $url := required "monitoring.alerts.runbookBaseUrl: give the folder of the runbooks" $alerts.runbookBaseUrl -}}
{{- range $alerts.disabled }}
{{- if not ($.Files.Get (printf "alerts/%s.yaml" .)) }}
{{- fail (printf "monitoring.alerts.disabled: there is no alert %s" .) }}
{{- end }}
{{- end }}
{{- range $path, $content := .Files.Glob "alerts/*.yaml" }}
{{- $alert := trimSuffix ".yaml" (base $path) }}
{{- if not (has $alert $alerts.disabled) }}
{{- $rule := tpl (toString $content) $ | fromYaml }}
{{- if hasKey $rule "Error" }}
{{- fail (printf "%s: %s" $path $rule.Error) }}
{{- end }}
{{- if $rule }}
{{- $_ := set $rule.annotations "runbook_url" (printf "%s/%s.md" (trimSuffix "/" $url) $alert) }}
{{ list $rule | toYaml }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Label matchers for the release's pods. By default kube-state-metrics exports the names of pods, not their labels. */}}
{{- define "batchllm.podMatchers" -}}
namespace={{ .Release.Namespace | quote }},pod=~{{ .Values.monitoring.alerts.podPattern | quote }}
{{- end -}}

{{/* Those for its Jobs, without the pre-pull Job. */}}
{{- define "batchllm.jobMatchers" -}}
namespace={{ .Release.Namespace | quote }},job_name=~{{ .Values.monitoring.alerts.podPattern | quote }},job_name!~".*-pre-pull-.*"
{{- end -}}
